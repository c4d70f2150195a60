/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_function.c - attributes and parameters of functions, and of kernels, which are the same objects. */
#include "simulated_driver/cuda_internal.h"

#define DEFAULT_SHARED_BYTES 49152u
#define DEFAULT_REGISTERS 32u
#define MOST_THREADS 1024u
#define MOST_CLUSTER_BLOCKS 16

static CUfunction of_kernel(CUkernel kernel)
{
	return (CUfunction)(void *)kernel;
}

static CUresult check_kernel(CUkernel kernel)
{
	SIM_REQUIRE_READY();
	return sim_is(kernel, SIM_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- attributes -------------------------------------------------------------------------------------------------------- */

static bool compiled_attribute(int *value, CUfunction_attribute attribute, CUfunction function, const struct sim_device *device)
{
	const struct sim_image_kernel *kernel = function->kernel;
	uint32_t capability = device->hardware->compute_major * 10 + device->hardware->compute_minor;
	uint32_t compiled_for = function->module->image.capability ? function->module->image.capability : capability;
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = (int)(kernel->max_threads ? kernel->max_threads : MOST_THREADS); return true;
	case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = (int)(kernel->registers ? kernel->registers : DEFAULT_REGISTERS); return true;
	case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = (int)kernel->shared_bytes; return true;
	case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = (int)kernel->local_bytes; return true;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION:
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = (int)compiled_for; return true;
	case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
	case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *value = 0; return true;
	default: return false;
	}
}

static int default_dynamic_shared_bytes(CUfunction function)
{
	uint32_t fixed = function->kernel->shared_bytes;
	return fixed < DEFAULT_SHARED_BYTES ? (int)(DEFAULT_SHARED_BYTES - fixed) : 0;
}

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction function, const struct sim_device *device)
{
	SIM_REQUIRE(value);
	if (compiled_attribute(value, attribute, function, device))
		return CUDA_SUCCESS;
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		*value = function->max_dynamic_shared_bytes ? function->max_dynamic_shared_bytes : default_dynamic_shared_bytes(function);
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = function->carveout; return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: *value = function->cluster_must_be_set; return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: *value = (int)function->cluster[0]; return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: *value = (int)function->cluster[1]; return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: *value = (int)function->cluster[2]; return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: *value = function->non_portable_cluster; return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: *value = function->cluster_policy; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

/* A size that the compiler fixed cannot change. Clusters exist since compute capability 9.0; what only allows or prefers is accepted on all
 * devices. */
static CUresult set_cluster_attribute(CUfunction_attribute attribute, int value, CUfunction function, const struct sim_device *device)
{
	unsigned axis = (unsigned)attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH;
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
		if (device->hardware->compute_major < 9)
			return CUDA_ERROR_NOT_SUPPORTED;
		SIM_REQUIRE(value >= 0 && value <= MOST_CLUSTER_BLOCKS);
		if (function->kernel->cluster[axis])
			return CUDA_ERROR_NOT_PERMITTED;
		function->cluster[axis] = (unsigned)value;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
		SIM_REQUIRE(value == 0 || value == 1);
		function->non_portable_cluster = value;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
		SIM_REQUIRE(value >= 0 && value <= 2); /* default, spread, load balancing */
		function->cluster_policy = value;
		return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult set_attribute(CUfunction_attribute attribute, int value, CUfunction function, const struct sim_device *device)
{
	int most = 0;
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device->ordinal);
		SIM_REQUIRE(value >= 0 && value <= most);
		function->max_dynamic_shared_bytes = value;
		return CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		SIM_REQUIRE(value >= -1 && value <= 100);
		function->carveout = value;
		return CUDA_SUCCESS;
	default: return set_cluster_attribute(attribute, value, function, device);
	}
}

static CUresult check_function(CUfunction function, CUcontext *context)
{
	SIM_TRY(sim_current(context));
	return sim_is(function, SIM_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
	CUcontext context;
	SIM_TRY(check_function(function, &context));
	return get_attribute(value, attribute, function, context->device);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
	CUcontext context;
	SIM_TRY(check_function(function, &context));
	return set_attribute(attribute, value, function, context->device);
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice ordinal)
{
	SIM_TRY(check_kernel(kernel));
	struct sim_device *device = sim_device_of(ordinal);
	return device ? get_attribute(value, attribute, of_kernel(kernel), device) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice ordinal)
{
	SIM_TRY(check_kernel(kernel));
	struct sim_device *device = sim_device_of(ordinal);
	return device ? set_attribute(attribute, value, of_kernel(kernel), device) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice ordinal)
{
	SIM_TRY(check_kernel(kernel));
	if (!sim_device_of(ordinal))
		return CUDA_ERROR_INVALID_DEVICE;
	of_kernel(kernel)->cache_config = (int)config;
	return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
	CUcontext context;
	SIM_TRY(check_function(function, &context));
	function->cache_config = (int)config;
	return CUDA_SUCCESS;
}

CUresult cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig config)
{
	CUcontext context;
	(void)config;   /* banks have had one size since Maxwell */
	return check_function(function, &context);
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
	CUcontext context;
	SIM_REQUIRE(module);
	SIM_TRY(check_function(function, &context));
	*module = function->module;
	return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function)
{
	SIM_REQUIRE(name);
	SIM_TRY(check_kernel((CUkernel)(void *)function));
	*name = function->kernel->name;
	return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
	return cuFuncGetName(name, of_kernel(kernel));
}

/* ---- parameters -------------------------------------------------------------------------------------------------------- */

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *bytes)
{
	SIM_REQUIRE(offset);
	SIM_TRY(check_kernel(kernel));
	const struct sim_image_kernel *image = of_kernel(kernel)->kernel;
	SIM_REQUIRE(index < image->n_parameters);
	*offset = image->parameters[index].offset;
	if (bytes)
		*bytes = image->parameters[index].bytes;
	return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *bytes)
{
	return cuKernelGetParamInfo((CUkernel)(void *)function, index, offset, bytes);
}

/* ---- lazy loading ------------------------------------------------------------------------------------------------------ */

CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
	CUcontext context;
	SIM_REQUIRE(state);
	SIM_TRY(check_function(function, &context));
	bool is_loaded = !function->module->is_library || sim_module_is_loaded(function->module, context);
	*state = is_loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
	return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function)
{
	CUcontext context;
	SIM_TRY(check_function(function, &context));
	return sim_function_load(function, context);
}
