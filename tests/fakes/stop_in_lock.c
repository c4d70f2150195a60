/* SPDX-License-Identifier: Apache-2.0 */
/* A process that stops (SIGSTOP) holding a lock: preloaded, it raises the signal right after the process took the write lock of its open
 * file description on byte STOP_AT_OFFSET of a file called "region". It does so once; after SIGCONT it runs normally. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_the_lock(int descriptor, int command, const struct flock *lock)
{
	static const char name[] = "/region";
	char link[64], path[4096];
	const char *offset = getenv("STOP_AT_OFFSET");

	if (command != F_OFD_SETLK || lock->l_type != F_WRLCK || offset == NULL || lock->l_start != atoll(offset))
		return false;
	snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
	ssize_t length = readlink(link, path, sizeof path);
	size_t end = sizeof name - 1;
	return length >= (ssize_t)end && memcmp(path + length - end, name, end) == 0;
}

static int stop_after(const char *name, int descriptor, int command, void *argument)
{
	static bool stopped;
	int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
	int result = real(descriptor, command, argument);

	if (result == 0 && !stopped && is_the_lock(descriptor, command, argument)) {
		stopped = true;
		raise(SIGSTOP);
	}
	return result;
}

#define WRAP(name)                                                    \
    int name(int descriptor, int command, ...)                        \
    {                                                                 \
        va_list list;                                                 \
        va_start(list, command);                                      \
        void *argument = va_arg(list, void *);                        \
        va_end(list);                                                 \
        return stop_after(#name, descriptor, command, argument);      \
    }

WRAP(fcntl)
WRAP(fcntl64)
