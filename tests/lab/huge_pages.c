/* Takes huge pages of 2 MiB one by one, says how many it got and why no more, and stays. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE (2UL << 20)

int main(void)
{
	int got = 0;
	char *at;

	while ((at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0)) != MAP_FAILED) {
		*at = 1;
		got++;
	}
	printf("pages: %d, then %s\n", got, strerror(errno));
	fflush(stdout);
	for (;;)
		pause();
}
