/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - finding the driver.
 *
 * A program that registers code but uses no GPU must run without a driver, so libcuda.so.1 is no dependency: it is opened by its name at
 * the first call that needs it. Under the shim this name is the front, or the preload library answers for its symbols.
 */
#include "simulated_runtime/runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

struct driver cu;

static atomic_bool started;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static const struct {
	const char *symbol;
	size_t offset;
} symbols[] = {
#define DRIVER(symbol) { #symbol, offsetof(struct driver, symbol) },
#include "simulated_runtime/driver.def"
#undef DRIVER
};

static bool find_functions(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return false;
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
		*(void **)((char *)&cu + symbols[i].offset) = dlsym(library, symbols[i].symbol);
	return cu.cuInit && cu.cuDriverGetVersion;
}

/* A driver older than the runtime's major version is refused as a whole. */
static cudaError_t start(void)
{
	int version;
	if (!find_functions())
		return cudaErrorInsufficientDriver;
	RT_TRY(rt_error(cu.cuInit(0)));
	RT_TRY(rt_error(cu.cuDriverGetVersion(&version)));
	return version / 1000 < RUNTIME_MAJOR ? cudaErrorInsufficientDriver : cudaSuccess;
}

cudaError_t rt_start(void)
{
	cudaError_t error = cudaSuccess;
	if (atomic_load_explicit(&started, memory_order_acquire))
		return cudaSuccess;
	pthread_mutex_lock(&opening);
	if (!atomic_load_explicit(&started, memory_order_relaxed)) {
		error = start();
		if (error == cudaSuccess)
			atomic_store_explicit(&started, true, memory_order_release); /* pairs with the acquire above: `cu` is complete */
	}
	pthread_mutex_unlock(&opening);
	return error;
}

/* The runtime's version is that of the headers whose ABI it has; the driver's version is asked without starting the driver. */
EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
	if (!version)
		return rt_return(cudaErrorInvalidValue);
	*version = rt_version;
	return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
	if (!version)
		return rt_return(cudaErrorInvalidValue);
	*version = 0; /* no driver, as documented */
	pthread_mutex_lock(&opening);
	bool found = atomic_load_explicit(&started, memory_order_relaxed) || find_functions();
	pthread_mutex_unlock(&opening);
	return found ? rt_return(rt_error(cu.cuDriverGetVersion(version))) : cudaSuccess;
}

static cudaError_t entry_point(const char *symbol, void **function, unsigned int version, unsigned long long flags, int *status)
{
	CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	if (!symbol || !function)
		return cudaErrorInvalidValue;
	RT_TRY(rt_start());
	cudaError_t error = RT_CALL(cuGetProcAddress_v2, symbol, function, (int)version, flags, &found);
	if (status)
		*status = (int)found;
	if (error != cudaErrorSymbolNotFound)
		return error;
	*function = NULL; /* documented: success, and the status says why */
	return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version, unsigned long long flags,
						    int *status)
{
	return rt_return(entry_point(symbol, function, version, flags, status));
}

/* Removed in CUDA 13: the version is the runtime's. */
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status)
{
	return rt_return(entry_point(symbol, function, (unsigned int)rt_version, flags, status));
}
