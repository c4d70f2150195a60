/* SPDX-License-Identifier: Apache-2.0 */
/* A separate library, so that it can be opened with RTLD_DEEPBIND: its dlsym is then libc's, even if a preload has its own. */
#define _GNU_SOURCE
#include <dlfcn.h>

__attribute__((visibility("default"))) void *client_lookup(void *handle, const char *symbol);

void *client_lookup(void *handle, const char *symbol)
{
	return dlsym(handle, symbol);
}
