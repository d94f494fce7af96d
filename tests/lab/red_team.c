/* A task that attacks its host: one probe a line, `name<TAB>result`, for docs/security.md.
 *
 * A probe returns 0 where it reached what no task may reach. Static, so it is its image's only file:
 *   cc -static -O1 -Wall -o red_team red_team.c
 * argv: PORT that it was not given, PID of a process of another task. Without, it is that other task.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/netlink.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int port, other;

static int closed(int fd) { if (fd < 0) return -1; close(fd); return 0; }
static int folder(const char *path) {
    DIR *d = opendir(path);
    if (!d) return -1;
    int found = 0;
    for (struct dirent *e; (e = readdir(d));) found += e->d_name[0] != '.';
    closedir(d);
    errno = ENOENT; /* an empty folder shows nothing */
    return found ? 0 : -1;
}
static int writes(const char *path, const char *text) {
    int fd = open(path, O_WRONLY);
    if (fd < 0) return -1;
    int done = write(fd, text, strlen(text)) < 0 ? -1 : 0;
    close(fd);
    return done;
}
static int reads(const char *path) {
    char byte;
    int fd = open(path, O_RDONLY);
    if (fd < 0) return -1;
    int done = read(fd, &byte, 1) == 1 ? 0 : -1;
    close(fd);
    return done;
}
static int output_of(int pid) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/fd/1", pid);
    return writes(path, "of somebody else\n");
}
static int unix_to(const char *path, int length) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path, path, length);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    int done = connect(fd, (void *)&to, sizeof(sa_family_t) + length);
    close(fd);
    return done;
}
static int inet_to(const char *host, int at) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(at)};
    inet_pton(AF_INET, host, &to.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    struct timeval patience = {.tv_sec = 5};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    int done = connect(fd, (void *)&to, sizeof to);
    close(fd);
    return done;
}
static int binds(int at) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(at)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    int done = bind(fd, (void *)&to, sizeof to);
    close(fd);
    return done;
}
static int ring(struct io_uring_params *p) { return syscall(SYS_io_uring_setup, 4, p); }
static int ringed(int fd, struct io_uring_params *p, struct io_uring_sqe what) {
    /* one request that the kernel does in its own name, past any filter of system calls */
    char *sq = mmap(0, p->sq_off.array + 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    char *cq = mmap(0, p->cq_off.cqes + 128, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_CQ_RING);
    struct io_uring_sqe *asked = mmap(0, 4 * sizeof *asked, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || asked == MAP_FAILED) return -1;
    unsigned *tail = (void *)(sq + p->sq_off.tail), at = *tail & 3;
    asked[at] = what;
    ((unsigned *)(sq + p->sq_off.array))[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) != 1) return -1;
    unsigned *head = (void *)(cq + p->cq_off.head);
    int done = ((struct io_uring_cqe *)(cq + p->cq_off.cqes))[*head & 7].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    if (done < 0) errno = -done;
    return done;
}
static int ringed_unix(const char *path, int length) {
    struct io_uring_params p = {0};
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path, path, length);
    int fd = ring(&p);
    if (fd < 0) return -1;
    int made = ringed(fd, &p, (struct io_uring_sqe){.opcode = 45 /* SOCKET, of 5.19 */, .fd = AF_UNIX, .off = SOCK_STREAM});
    if (made < 0) return -1;
    return ringed(fd, &p, (struct io_uring_sqe){.opcode = IORING_OP_CONNECT, .fd = made, .addr = (unsigned long)&to,
                                                .off = sizeof(sa_family_t) + length});
}
static int signals_somebody(void) {
    for (int pid = 1; pid < 40000; pid++)
        if (pid != getpid() && kill(pid, 0) == 0) return 0;
    return -1;
}
static int sees_processes(void) {
    DIR *d = opendir("/proc");
    int others = 0;
    if (!d) return -1;
    for (struct dirent *e; (e = readdir(d));) others += atoi(e->d_name) > 0 && atoi(e->d_name) != getpid();
    closedir(d);
    errno = ENOENT;
    return others ? 0 : -1;
}
static int climbs(void) {
    int top = open("/", O_RDONLY | O_DIRECTORY);
    if (top < 0 || mkdir("/tmp/cage", 0700) || chroot("/tmp/cage") || fchdir(top)) return -1;
    return folder("../../../var/lib/twine");
}
static int makes_setuid(void) { return closed(open("/tmp/own", O_CREAT | O_RDWR, 0600)) || chmod("/tmp/own", 04755); }
static int peeks(void) {
    char byte;
    struct iovec here = {&byte, 1}, there = {(void *)0x400000, 1};
    return process_vm_readv(other, &here, 1, &there, 1, 0) < 0 ? -1 : 0;
}
static int is_preferred(void) { setpriority(PRIO_PROCESS, 0, -1); errno = EPERM; return getpriority(PRIO_PROCESS, 0) < 0 ? 0 : -1; }
static int may_gain(void) { errno = EPERM; return prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 ? -1 : 0; }
static int unfiltered(void) { errno = EPERM; return prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == 2 ? -1 : 0; }
static int becomes_root(void) { return setresuid(0, 0, 0) ? -1 : reads("/proc/1/environ"); }
static int sets_clock(void) { struct timespec t = {1, 0}; return clock_settime(CLOCK_REALTIME, &t); }
static int attaches(void) { return ptrace(PTRACE_ATTACH, other, 0, 0) ? -1 : 0; }
static int handles(void) { char h[64] = {8, 0, 0, 0, 1}; return syscall(SYS_open_by_handle_at, AT_FDCWD, h, 0) < 0 ? -1 : 0; }
static int realtime(void) { struct sched_param p = {1}; return sched_setscheduler(0, SCHED_FIFO, &p); }
static int capable(void) { return syscall(SYS_capset, (int[]){0x20080522, 0}, (int[]){-1, -1, -1, -1, -1, -1}); }

#define PROBES \
    P("files: state of the agent", folder("/var/lib/twine")) \
    P("files: run folder of the agent", folder("/run/twine")) \
    P("files: passwords of the host", reads("/etc/shadow")) \
    P("files: homes of the host", folder("/root")) \
    P("files: out of the root by chroot", climbs()) \
    P("files: write into its own image", closed(open("/new", O_CREAT | O_WRONLY, 0600))) \
    P("files: root of process 1", folder("/proc/1/root")) \
    P("files: environment of process 1", reads("/proc/1/environ")) \
    P("files: the host's journal", folder("/var/log/journal") && folder("/run/log/journal")) \
    P("files: make a set-uid file", makes_setuid()) \
    P("files: shared memory of others", folder("/dev/shm")) \
    P("files: change how names are found", writes("/etc/resolv.conf", "nameserver 10.0.0.1\n") && writes("/etc/hosts", "\n")) \
    P("kernel: write a sysctl", writes("/proc/sys/vm/swappiness", "1")) \
    P("kernel: core_pattern", writes("/proc/sys/kernel/core_pattern", "|/x")) \
    P("kernel: sysrq", writes("/proc/sysrq-trigger", "h")) \
    P("kernel: write below /sys", writes("/sys/kernel/mm/transparent_hugepage/enabled", "never")) \
    P("kernel: memory by /proc/kcore", reads("/proc/kcore")) \
    P("kernel: log", klogctl(3, (char[64]){0}, 64) < 0 ? -1 : 0) \
    P("kernel: load a module", syscall(SYS_init_module, "", 0, "")) \
    P("kernel: load another kernel", syscall(SYS_kexec_load, 0, 0, 0, 0)) \
    P("kernel: restart the host", reboot(RB_DISABLE_CAD)) \
    P("kernel: swap", swapon("/tmp/own", 0)) \
    P("kernel: set the clock", sets_clock()) \
    P("kernel: set the host's name", sethostname("x", 1)) \
    P("kernel: BPF", syscall(SYS_bpf, 0, (char[128]){0}, 128)) \
    P("kernel: performance counters", closed(syscall(SYS_perf_event_open, (char[128]){0}, 0, -1, -1, 0))) \
    P("kernel: userfaultfd", closed(syscall(SYS_userfaultfd, 0))) \
    P("kernel: accounting of all processes", acct("/tmp/own")) \
    P("kernel: a ring of requests", closed(ring(&(struct io_uring_params){0}))) \
    P("kernel: files by handle", handles()) \
    P("kernel: realtime priority", realtime()) \
    P("kernel: a higher priority", is_preferred()) \
    P("cgroup: move a process", writes("/sys/fs/cgroup/cgroup.procs", "0")) \
    P("cgroup: raise its own limit", writes("/sys/fs/cgroup/memory.max", "max")) \
    P("device: the disk", reads("/dev/vda")) \
    P("device: memory", reads("/dev/mem")) \
    P("device: kernel log", reads("/dev/kmsg")) \
    P("device: make a node", mknod("/tmp/disk", S_IFBLK | 0600, makedev(254, 0))) \
    P("namespace: mount", mount("none", "/tmp", "tmpfs", 0, "")) \
    P("namespace: unmount", umount2("/tmp", MNT_DETACH)) \
    P("namespace: a user namespace", unshare(CLONE_NEWUSER)) \
    P("namespace: a mount namespace", unshare(CLONE_NEWNS)) \
    P("namespace: a network namespace", unshare(CLONE_NEWNET)) \
    P("process: see others", sees_processes()) \
    P("process: signal process 1", kill(1, 0)) \
    P("process: signal a neighbour", kill(other, 0)) \
    P("process: signal any other", signals_somebody()) \
    P("process: write to a neighbour's output", output_of(other)) \
    P("process: trace a neighbour", attaches()) \
    P("process: read a neighbour's memory", peeks()) \
    P("rights: become root", becomes_root()) \
    P("rights: take capabilities", capable()) \
    P("rights: gain by a program", may_gain()) \
    P("rights: no filter of system calls", unfiltered()) \
    P("network: the agent's socket", unix_to("/run/twine/agent.sock", 21)) \
    P("network: D-Bus", unix_to("/run/dbus/system_bus_socket", 27)) \
    P("network: output of others in the journal", unix_to("/run/systemd/journal/stdout", 28)) \
    P("network: an abstract socket", unix_to("\0twine-red-team", 15)) \
    P("network: an abstract socket by a ring", ringed_unix("\0twine-red-team", 15)) \
    P("network: metadata service", inet_to("169.254.169.254", 80)) \
    P("network: the agent's port", inet_to("127.0.0.1", 7443)) \
    P("network: a port that it was not given", binds(port)) \
    P("network: raw packets", closed(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP))) \
    P("network: packets of all", closed(socket(AF_PACKET, SOCK_RAW, 0))) \
    P("network: netlink", closed(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)))

#define P(name, probe) { errno = 0; int reached = (probe) == 0; \
    printf("%s\t%s\n", name, reached ? "REACHED" : strerrorname_np(errno) ? strerrorname_np(errno) : "0"); }

int main(int argc, char **argv) {
    if (argc < 3) {
        close(open("/dev/shm/of-a-neighbour", O_CREAT | O_WRONLY, 0644));
        return pause();
    }
    port = atoi(argv[1]);
    other = atoi(argv[2]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    PROBES
    printf("over\tyes\n");
    return 0;
}
