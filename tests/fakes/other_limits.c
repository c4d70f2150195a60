// SPDX-License-Identifier: Apache-2.0
/* A tenant's library that gives the shim other limits than the container's: every open of a file "limits" opens OTHER_LIMITS instead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static const char *redirected(const char *path)
{
	size_t length = strlen(path);
	const char *other = getenv("OTHER_LIMITS");

	return other && length > 7 && !strcmp(path + length - 7, "/limits") ? other : path;
}

static int call(const char *name, const char *path, int flags, mode_t mode)
{
	int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);

	return real(redirected(path), flags, mode);
}

#define OPEN(name)                                                                                                                         \
	int name(const char *path, int flags, ...)                                                                                         \
	{                                                                                                                                  \
		va_list arguments;                                                                                                         \
		va_start(arguments, flags);                                                                                                \
		mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;                                                             \
		va_end(arguments);                                                                                                         \
		return call(#name, path, flags, mode);                                                                                     \
	}

OPEN(open)
OPEN(open64)
