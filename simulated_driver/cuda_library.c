/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_library.c - libraries: modules that belong to no context, and their kernels.
 *
 * A library costs nothing when it is loaded. Its code and variables come into the memory of a context at the first use there: a function or
 * module made of it, a variable, or the launch of a kernel.
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/cuda_internal.h"

static CUmodule of_library(CUlibrary library)
{
	return (CUmodule)(void *)library;
}
static CUfunction of_kernel(CUkernel kernel)
{
	return (CUfunction)(void *)kernel;
}

static CUresult check_library(CUlibrary library)
{
	SIM_REQUIRE_READY();
	return sim_is(library, SIM_KIND_MODULE) && of_library(library)->is_library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult check_kernel(CUkernel kernel)
{
	SIM_REQUIRE_READY();
	return sim_is(kernel, SIM_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult load(CUlibrary *out, const void *image, uint64_t bytes)
{
	CUmodule module;
	SIM_TRY(sim_module_new(image, bytes, &module));
	sim_library_list(module);
	*out = (CUlibrary)(void *)module;
	return CUDA_SUCCESS;
}

/* An option without a value needs no array of values. */
CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *jit, void **jit_values, unsigned int n_jit,
			   CUlibraryOption *options, void **values, unsigned int n_options)
{
	SIM_REQUIRE_READY();
	(void)values;
	SIM_REQUIRE(out && (n_jit == 0 || (jit && jit_values)) && (n_options == 0 || options));
	sim_jit_options(n_jit, jit, jit_values);
	return load(out, code, 0);
}

CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values, unsigned int n_jit,
			       CUlibraryOption *options, void **values, unsigned int n_options)
{
	void *image;
	uint64_t bytes;
	SIM_REQUIRE_READY();
	(void)values;
	SIM_REQUIRE(out && (n_jit == 0 || (jit && jit_values)) && (n_options == 0 || options));
	sim_jit_options(n_jit, jit, jit_values);
	SIM_TRY(sim_module_read_file(path, &image, &bytes));
	CUresult result = load(out, image, bytes);
	free(image);
	return result;
}

CUresult cuLibraryUnload(CUlibrary library)
{
	SIM_TRY(check_library(library));
	SIM_TRY(sim_capture_unsafe_call());
	sim_module_delete(of_library(library));
	return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
	SIM_REQUIRE(out && name);
	SIM_TRY(check_library(library));
	return sim_module_function(of_library(library), name, (CUfunction *)(void *)out);
}

CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary library)
{
	SIM_TRY(check_library(library));
	return cuModuleGetFunctionCount(count, of_library(library));
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary library)
{
	SIM_TRY(check_library(library));
	SIM_REQUIRE(kernels || count == 0);
	sim_module_list(of_library(library), (CUfunction *)(void *)kernels, count);
	return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
	CUcontext context;
	SIM_REQUIRE(module);
	SIM_TRY(check_library(library));
	SIM_TRY(sim_current(&context));
	SIM_TRY(sim_module_load(of_library(library), context));
	*module = of_library(library);
	return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
	CUcontext context;
	SIM_REQUIRE(name && (address || bytes));
	SIM_TRY(check_library(library));
	SIM_TRY(sim_current(&context));
	return sim_module_variable(of_library(library), context, name, address, bytes);
}

static bool is_managed(CUmodule module, const char *name)
{
	const struct sim_image *image = &module->image;
	for (uint32_t i = 0; i < image->n_variables; i++)
		if (strcmp(image->variables[i].name, name) == 0)
			return image->blocks[image->variables[i].block].is_managed;
	return false;
}

CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
	CUcontext context;
	SIM_REQUIRE(name && (address || bytes));
	SIM_TRY(check_library(library));
	if (!is_managed(of_library(library), name))
		return CUDA_ERROR_NOT_FOUND;
	SIM_TRY(sim_current(&context));
	return sim_module_variable(of_library(library), context, name, address, bytes);
}

/* No simulated device has CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS. */
CUresult cuLibraryGetUnifiedFunction(void **function, CUlibrary library, const char *symbol)
{
	SIM_REQUIRE(function && symbol);
	SIM_TRY(check_library(library));
	return CUDA_ERROR_NOT_FOUND;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
	CUcontext context;
	SIM_REQUIRE(function);
	SIM_TRY(check_kernel(kernel));
	SIM_TRY(sim_current(&context));
	SIM_TRY(sim_function_load(of_kernel(kernel), context));
	*function = of_kernel(kernel);
	return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
	SIM_REQUIRE(library);
	SIM_TRY(check_kernel(kernel));
	if (!of_kernel(kernel)->module->is_library)
		return CUDA_ERROR_INVALID_HANDLE;
	*library = (CUlibrary)(void *)of_kernel(kernel)->module;
	return CUDA_SUCCESS;
}
