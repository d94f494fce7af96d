#!/bin/sh
# Runs inside the new root file system, once: makes a Debian a lab guest.
set -eu

# --- reaching it: root by vagrant's well-known insecure key, on an isolated network only
mkdir -p /root/.ssh
chmod 0700 /root/.ssh
cat >/root/.ssh/authorized_keys <<'KEY'
ssh-rsa AAAAB3NzaC1yc2EAAAABIwAAAQEA6NF8iallvQVp22WDkTkyrtvp9eWW6A8YVr+kz4TjGYe7gHzIw+niNltGEFHzD8+v1I2YJ6oXevct1YeS0o9HZyN1Q9qgCgzUFtdOKLv6IedplqoPkcmF0aYet2PkEDo3MlTBckFXPITAMzF8dJSIFo9D8HfdOV0IAdx4O7PtixWKn5y2hMNG0zQPyUecp4pzC6kivAIhyfHilFR61RGL+GPXQ2MWZWFYbAGjyiYJnAmCP3NOTd0jMZEnDkbUvxhMmBYSdETk1rRgm+R4LOzFUGaHqHDLKLX+FIPKcF96hrucXzcWyLbIbEgE98OHlnVYCzRdK8jlqm8tehUc9c9WhQ== vagrant insecure public key
KEY
chmod 0600 /root/.ssh/authorized_keys
# No PAM: a logind session per connection costs most of a second under TCG.
cat >/etc/ssh/sshd_config.d/lab.conf <<'SSHD'
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
MaxSessions 100
SSHD
mkdir -p /etc/systemd/system/ssh.service.d
printf '[Service]\nExecStartPre=\n' >/etc/systemd/system/ssh.service.d/lab.conf # it checks its own file
# One key type, made here: generating them at first boot takes seconds under TCG.
rm -f /etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key

# --- network: one interface, address by DHCP (the lab fixes it by MAC)
cat >/etc/systemd/network/10-lab.network <<'NET'
[Match]
Name=eth0

[Network]
DHCP=ipv4
LinkLocalAddressing=no
IPv6AcceptRA=no

[DHCPv4]
ClientIdentifier=mac
# each of these would start hostnamed or resolved, seconds under TCG
UseHostname=no
SendHostname=no
UseDNS=no
UseNTP=no
NET
systemctl --quiet enable systemd-networkd.service ssh.service
printf '127.0.0.1 localhost\n' >/etc/hosts
for n in 1 2 3 4 5 6 7 8 9; do
    printf '10.77.0.1%d m%d\n' "$n" "$n" >>/etc/hosts
done
: >/etc/machine-id # empty: every clone makes its own
rm -f /etc/hostname /etc/resolv.conf /var/lib/dbus/machine-id
: >/etc/fstab # the initrd mounts both subvolumes
mkdir -p /var/lib/twine

# --- journal: the agent reads the tasks' output from it, so it is kept, within bounds
mkdir -p /var/log/journal /etc/systemd/journald.conf.d
cat >/etc/systemd/journald.conf.d/lab.conf <<'JOURNAL'
[Journal]
Storage=persistent
SystemMaxUse=96M
SystemMaxFileSize=16M
RateLimitIntervalSec=0
JOURNAL

# --- every controller in the top-level slices, accounted for
mkdir -p /etc/systemd/system.conf.d
cat >/etc/systemd/system.conf.d/lab.conf <<'SYSTEM'
[Manager]
DefaultCPUAccounting=yes
DefaultMemoryAccounting=yes
DefaultTasksAccounting=yes
DefaultIOAccounting=yes
DefaultTimeoutStopSec=15s
SYSTEM

# --- per-subvolume limits: simple quotas need kernel 6.7 and btrfs-progs 6.8, which the
# guest has and the host that builds it may lack, so the first boot turns them on
cat >/etc/systemd/system/lab-quota.service <<'QUOTA'
[Unit]
Description=Simple quotas on the lab's btrfs
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target
ConditionPathExists=!/var/lib/lab-quota-enabled

[Service]
Type=oneshot
ExecStart=/usr/bin/btrfs quota enable --simple /
ExecStart=/usr/bin/touch /var/lib/lab-quota-enabled

[Install]
WantedBy=sysinit.target
QUOTA
systemctl --quiet enable lab-quota.service

# --- what a lab guest never needs and a slow boot notices
# (a script that writes to ttyS0 from a unit dies when serial-getty takes the terminal)
systemctl --quiet mask serial-getty@ttyS0.service getty@tty1.service \
    systemd-pstore.service systemd-update-utmp.service systemd-journal-catalog-update.service \
    systemd-hwdb-update.service ldconfig.service systemd-network-generator.service \
    systemd-remount-fs.service systemd-tpm2-setup-early.service systemd-tpm2-setup.service \
    systemd-firstboot.service systemd-hibernate-clear.service systemd-random-seed.service \
    systemd-pcrmachine.service systemd-pcrphase.service systemd-pcrphase-sysinit.service \
    systemd-binfmt.service proc-sys-fs-binfmt_misc.automount proc-sys-fs-binfmt_misc.mount \
    systemd-networkd-persistent-storage.service systemd-udev-load-credentials.service \
    modprobe@drm.service modprobe@fuse.service modprobe@configfs.service \
    systemd-ask-password-console.path systemd-ask-password-wall.path \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer \
    sys-fs-fuse-connections.mount sys-kernel-config.mount run-lock.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount dev-mqueue.mount
# hostname and login services start on demand, over D-Bus
rm -f /usr/lib/systemd/system/multi-user.target.wants/systemd-logind.service \
    /usr/lib/systemd/system/multi-user.target.wants/getty.target \
    /etc/systemd/system/multi-user.target.wants/remote-fs.target
for generator in fstab getty gpt-auto hibernate-resume rc-local ssh sysv tpm2 system-update; do
    mkdir -p /etc/systemd/system-generators
    ln -sf /dev/null "/etc/systemd/system-generators/systemd-$generator-generator"
done
for unit in kexec.service kexec-load.service nftables.service; do
    systemctl --quiet disable "$unit" 2>/dev/null || true
done
# coldplug only what something here waits for, not every device of the emulated board
mkdir -p /etc/systemd/system/systemd-udev-trigger.service.d
cat >/etc/systemd/system/systemd-udev-trigger.service.d/lab.conf <<'UDEV'
[Service]
ExecStart=
ExecStart=/usr/bin/udevadm trigger --type=devices --action=add --subsystem-match=block --subsystem-match=net --subsystem-match=tty --subsystem-match=mem
UDEV
mkdir -p /etc/modprobe.d
cat >/etc/modprobe.d/lab.conf <<'MODULES'
# matched by udev at boot and of no use in a guest
blacklist kvm
blacklist kvm_intel
blacklist kvm_amd
blacklist aesni_intel
blacklist ghash_clmulni_intel
blacklist ata_piix
blacklist ata_generic
blacklist floppy
blacklist psmouse
blacklist i2c_piix4
blacklist pcspkr
blacklist evdev
blacklist serio_raw
blacklist button
blacklist vsock_loopback
blacklist vmw_vmci
blacklist vmw_vsock_vmci_transport
blacklist qemu_fw_cfg
blacklist sha1_ssse3
blacklist sha256_ssse3
blacklist sha512_ssse3
blacklist crc32_pclmul
blacklist crct10dif_pclmul
MODULES

# --- slimmer
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc /usr/share/man /usr/share/locale \
    /usr/share/info /var/log/*.log /var/log/apt /usr/lib/udev/hwdb.bin /usr/lib/udev/hwdb.d
# last: units with ConditionNeedsUpdate= then see nothing to do
touch /etc/.updated /var/.updated
