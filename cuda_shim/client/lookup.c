/* A library of its own, so that it can be opened with RTLD_DEEPBIND: its dlsym is then libc's, whatever was preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>

__attribute__((visibility("default"))) void *client_lookup(void *handle, const char *symbol);

void *client_lookup(void *handle, const char *symbol)
{
	return dlsym(handle, symbol);
}
