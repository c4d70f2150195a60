/* SPDX-License-Identifier: Apache-2.0 */
/* A wall clock that a test sets: preloaded into a process, it adds the seconds at the start of the file WALL_CLOCK_OFFSET to every reading
 * of the time of day. Monotonic clocks do not change, as in the kernel when the time is set.
 *
 * The kernel does not know this clock. So the one wait that names a time of day, a futex with FUTEX_CLOCK_REALTIME (of abseil, below
 * gRPC), is translated back; a wait that has begun is not cut short by a jump. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long (*real_syscall)(long number, ...);
static const volatile int64_t *offset_seconds;
static const int64_t no_offset;

__attribute__((constructor)) static void find_offset(void)
{
	real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	offset_seconds = &no_offset;
	const char *path = getenv("WALL_CLOCK_OFFSET");
	int file = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (file < 0)
		return;
	void *page = mmap(NULL, sizeof *offset_seconds, PROT_READ, MAP_SHARED, file, 0);
	close(file);
	if (page != MAP_FAILED)
		offset_seconds = page;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	if (real_syscall == NULL)
		find_offset();
	int failed = (int)real_syscall(SYS_clock_gettime, clock, now);
	if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += *offset_seconds;
	return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	(void)zone;
	struct timespec precise;
	int failed = clock_gettime(CLOCK_REALTIME, &precise);
	if (failed == 0)
		*now = (struct timeval){ precise.tv_sec, precise.tv_nsec / 1000 };
	return failed;
}

time_t time(time_t *at)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	if (at != NULL)
		*at = now.tv_sec;
	return now.tv_sec;
}

long syscall(long number, ...)
{
	long argument[6];
	va_list list;
	va_start(list, number);
	for (int i = 0; i < 6; i++)
		argument[i] = va_arg(list, long);
	va_end(list);
	if (real_syscall == NULL)
		find_offset();
	struct timespec until;
	const struct timespec *asked = (const struct timespec *)argument[3];
	if (number == SYS_futex && (argument[1] & FUTEX_CLOCK_REALTIME) != 0 && asked != NULL) {
		until = (struct timespec){ asked->tv_sec - *offset_seconds, asked->tv_nsec };
		argument[3] = (long)&until;
	}
	return real_syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4], argument[5]);
}
