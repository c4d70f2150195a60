/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "client/driver.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUDA_VERSION_ASKED 12000

struct driver cu;

const char driver_routes[] = "dlsym | getproc | link | dlvsym | deepbind | dlmopen";

typedef void *lookup_fn(void *handle, const char *symbol, const char *base);
typedef void *dlsym_fn(void *handle, const char *symbol);

static dlsym_fn *foreign_dlsym;
static __typeof__(&cuGetProcAddress_v2) get_proc_address;

static void *by_dlsym(void *handle, const char *symbol, const char *base)
{
	(void)base;
	return dlsym(handle, symbol);
}

/* What the static CUDA runtime does. */
static void *by_getproc(void *handle, const char *symbol, const char *base)
{
	(void)handle;
	(void)symbol;
	void *found = NULL;
	CUdriverProcAddressQueryResult status;
	if (get_proc_address(base, &found, CUDA_VERSION_ASKED, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS)
		return NULL;
	return found;
}

/* The order a linked program sees: the global scope. */
static void *by_global_scope(void *handle, const char *symbol, const char *base)
{
	(void)handle;
	(void)base;
	return dlsym(RTLD_DEFAULT, symbol);
}

/* A dlsym that was itself looked up: by version in libc, or by a library opened with RTLD_DEEPBIND. */
static void *by_foreign_dlsym(void *handle, const char *symbol, const char *base)
{
	(void)base;
	return foreign_dlsym(handle, symbol);
}

static bool find_libc_dlsym(void)
{
	static const char *const versions[] = { "GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5" };
	for (size_t i = 0; i < sizeof versions / sizeof *versions && !foreign_dlsym; i++)
		foreign_dlsym = (dlsym_fn *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
	return foreign_dlsym != NULL;
}

static bool find_deepbind_dlsym(void)
{
	char path[PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
	if (length < 0)
		return false;
	path[length] = '\0';
	char *slash = strrchr(path, '/');
	snprintf(slash, (size_t)(path + sizeof path - slash), "/../lib/client/libaliquot-client-lookup.so");
	void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (plugin)
		foreign_dlsym = (dlsym_fn *)dlsym(plugin, "client_lookup");
	else
		fprintf(stderr, "aliquot-cuda-client: %s\n", dlerror());
	return foreign_dlsym != NULL;
}

static void *open_library(const char *route)
{
	void *handle = strcmp(route, "dlmopen") == 0 ? dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW)
						     : dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (!handle)
		fprintf(stderr, "aliquot-cuda-client: expected to open libcuda.so.1, found: %s\n", dlerror());
	return handle;
}

static lookup_fn *prepare(const char *route, void *handle)
{
	if (strcmp(route, "dlsym") == 0 || strcmp(route, "dlmopen") == 0)
		return by_dlsym;
	if (strcmp(route, "link") == 0)
		return by_global_scope;
	if (strcmp(route, "dlvsym") == 0)
		return find_libc_dlsym() ? by_foreign_dlsym : NULL;
	if (strcmp(route, "deepbind") == 0)
		return find_deepbind_dlsym() ? by_foreign_dlsym : NULL;
	if (strcmp(route, "getproc") == 0) {
		get_proc_address = (__typeof__(get_proc_address))dlsym(handle, "cuGetProcAddress_v2");
		return get_proc_address ? by_getproc : NULL;
	}
	return NULL;
}

bool driver_open(const char *route)
{
	void *handle = open_library(route);
	if (!handle)
		return false;
	lookup_fn *lookup = prepare(route, handle);
	if (!lookup) {
		fprintf(stderr, "aliquot-cuda-client: cannot look up the driver by '%s'; routes are %s\n", route, driver_routes);
		return false;
	}
#define CLIENT_RESOLVE(symbol, base)                                                                     \
	cu.symbol = (__typeof__(cu.symbol))lookup(handle, #symbol, base);                                \
	if (!cu.symbol) {                                                                                \
		fprintf(stderr, "aliquot-cuda-client: the driver has no %s (by %s)\n", #symbol, route); \
		return false;                                                                            \
	}
	CLIENT_ENTRY_POINTS(CLIENT_RESOLVE)
#undef CLIENT_RESOLVE
	return true;
}
