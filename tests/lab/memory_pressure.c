/* Holds anonymous memory and reads a file of its own again and again: memory_pressure ANON_MIB FILE_MIB.
 *
 * It touches page after page of both, in no order. Says once a second how many it has.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MIB (1UL << 20)
#define PAGE 4096UL
#define PATH "/srv/pages"

static int written(size_t bytes)
{
	static char some[MIB];
	int fd = open(PATH, O_RDWR | O_CREAT | O_TRUNC, 0600);

	if (fd < 0)
		err(1, PATH);
	memset(some, 1, sizeof(some));
	for (size_t done = 0; done < bytes; done += MIB)
		if (write(fd, some, MIB) != (ssize_t)MIB)
			err(1, PATH);
	if (fsync(fd))
		err(1, PATH);
	return fd;
}

int main(int argc, char **argv)
{
	size_t anon = argc == 3 ? strtoul(argv[1], NULL, 10) * MIB : 0;
	size_t size = argc == 3 ? strtoul(argv[2], NULL, 10) * MIB : 0;
	unsigned long at = 1, pages = 0;
	time_t said = 0;
	volatile char *held, *file;

	if (!anon || !size)
		errx(2, "memory_pressure ANON_MIB FILE_MIB");
	held = mmap(NULL, anon, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	file = mmap(NULL, size, PROT_READ, MAP_SHARED, written(size), 0);
	if (held == MAP_FAILED || file == MAP_FAILED)
		err(1, "mmap");
	memset((void *)held, 1, anon);
	for (;;) {
		at = at * 6364136223846793005UL + 1442695040888963407UL;
		held[(at >> 24) % (anon / PAGE) * PAGE] += file[(at >> 20) % (size / PAGE) * PAGE];
		if (++pages % 64 == 0)
			usleep(20000);
		if (time(NULL) != said) {
			said = time(NULL);
			printf("pages %lu\n", pages);
			fflush(stdout);
		}
	}
}
