/* SPDX-License-Identifier: Apache-2.0 */
/* library.c - code that a program loads by itself. Kernels found in it are handles that launches take, so they are remembered. */
#include "simulated_runtime/runtime.h"

/* Loading and looking up need the driver, no context. */
static cudaError_t load_data(cudaLibrary_t *library, const void *code, CUjit_option *options, void **values, unsigned int count,
			     CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
	RT_TRY(rt_start());
	return RT_CALL(cuLibraryLoadData, library, code, options, values, count, library_options, library_values, library_count);
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, CUjit_option *options, void **values, unsigned int count,
				       CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
	return rt_return(load_data(library, code, options, values, count, library_options, library_values, library_count));
}

static cudaError_t load_file(cudaLibrary_t *library, const char *path, CUjit_option *options, void **values, unsigned int count,
			     CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
	RT_TRY(rt_start());
	return RT_CALL(cuLibraryLoadFromFile, library, path, options, values, count, library_options, library_values, library_count);
}

EXPORT cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t *library, const char *path, CUjit_option *options, void **values,
					   unsigned int count, CUlibraryOption *library_options, void **library_values,
					   unsigned int library_count)
{
	return rt_return(load_file(library, path, options, values, count, library_options, library_values, library_count));
}

static cudaError_t unload(cudaLibrary_t library)
{
	RT_TRY(rt_start());
	RT_TRY(RT_CALL(cuLibraryUnload, library));
	rt_forget_kernels(library);
	return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
	return rt_return(unload(library));
}

static cudaError_t get_kernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
	RT_TRY(rt_start());
	RT_TRY(RT_CALL(cuLibraryGetKernel, kernel, library, name));
	return rt_remember_kernel(*kernel, library);
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
	return rt_return(get_kernel(kernel, library, name));
}

static cudaError_t kernel_count(unsigned int *count, cudaLibrary_t library)
{
	RT_TRY(rt_start());
	return RT_CALL(cuLibraryGetKernelCount, count, library);
}

EXPORT cudaError_t cudaLibraryGetKernelCount(unsigned int *count, cudaLibrary_t library)
{
	return rt_return(kernel_count(count, library));
}

/* ---- variables and functions: each has an address in the current context --------------------------------------------- */

typedef CUresult (*address_query)(CUdeviceptr *device, size_t *bytes, CUlibrary library, const char *name);

/* A variable's address. `*query` is known when there is a context; NULL where the driver lacks it. */
static cudaError_t get_address(const address_query *query, void **address, size_t *bytes, cudaLibrary_t library, const char *name)
{
	CUdeviceptr device = 0;
	RT_TRY(rt_context());
	RT_TRY(*query ? rt_error((*query)(&device, bytes, library, name)) : cudaErrorCallRequiresNewerDriver);
	if (address)
		*address = (void *)(uintptr_t)device;
	return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryGetGlobal(void **address, size_t *bytes, cudaLibrary_t library, const char *name)
{
	return rt_return(get_address(&cu.cuLibraryGetGlobal, address, bytes, library, name));
}

EXPORT cudaError_t cudaLibraryGetManaged(void **address, size_t *bytes, cudaLibrary_t library, const char *name)
{
	return rt_return(get_address(&cu.cuLibraryGetManaged, address, bytes, library, name));
}

static cudaError_t get_unified_function(void **function, cudaLibrary_t library, const char *name)
{
	RT_TRY(rt_context());
	return RT_CALL(cuLibraryGetUnifiedFunction, function, library, name);
}

EXPORT cudaError_t cudaLibraryGetUnifiedFunction(void **function, cudaLibrary_t library, const char *name)
{
	return rt_return(get_unified_function(function, library, name));
}
