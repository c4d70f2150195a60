/* SPDX-License-Identifier: Apache-2.0 */
/* function.c - attributes of kernels, and how many of their blocks fit on an SM. */
#include "simulated_runtime/runtime.h"

/* Both need a context: attributes may differ between devices. */
static cudaError_t kernel_here(const void *function, CUkernel *kernel, CUdevice *device)
{
	RT_TRY(rt_kernel(function, kernel));
	RT_TRY(rt_context());
	return RT_CALL(cuCtxGetDevice, device);
}

/* Each field of cudaFuncAttributes with its attribute. A field is a size or an int. */
#define ATTRIBUTES(FIELD)                                                                                   \
	FIELD(sharedSizeBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)                                         \
	FIELD(constSizeBytes, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES)                                           \
	FIELD(localSizeBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)                                           \
	FIELD(maxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)                                  \
	FIELD(numRegs, CU_FUNC_ATTRIBUTE_NUM_REGS)                                                          \
	FIELD(ptxVersion, CU_FUNC_ATTRIBUTE_PTX_VERSION)                                                    \
	FIELD(binaryVersion, CU_FUNC_ATTRIBUTE_BINARY_VERSION)                                              \
	FIELD(cacheModeCA, CU_FUNC_ATTRIBUTE_CACHE_MODE_CA)                                                 \
	FIELD(maxDynamicSharedSizeBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)                   \
	FIELD(preferredShmemCarveout, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)                   \
	FIELD(clusterDimMustBeSet, CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET)                              \
	FIELD(requiredClusterWidth, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)                               \
	FIELD(requiredClusterHeight, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT)                             \
	FIELD(requiredClusterDepth, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH)                               \
	FIELD(clusterSchedulingPolicyPreference, CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)    \
	FIELD(nonPortableClusterSizeAllowed, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)

/* An attribute that the driver does not know is 0, as on a device without the feature. */
static cudaError_t function_attribute(CUfunction_attribute attribute, CUkernel kernel, CUdevice device, int *value)
{
	*value = 0;
	cudaError_t error = RT_CALL(cuKernelGetAttribute, value, attribute, kernel, device);
	return error == cudaErrorInvalidValue ? cudaSuccess : error;
}

static cudaError_t function_attributes(struct cudaFuncAttributes *attributes, const void *function)
{
	CUkernel kernel;
	CUdevice device;
	int value;
	if (!attributes)
		return cudaErrorInvalidValue;
	RT_TRY(kernel_here(function, &kernel, &device));
	*attributes = (struct cudaFuncAttributes){ 0 };
#define FIELD(field, attribute)                                         \
	RT_TRY(function_attribute(attribute, kernel, device, &value));  \
	attributes->field = (__typeof__(attributes->field))value;
	ATTRIBUTES(FIELD)
#undef FIELD
	return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
	return rt_return(function_attributes(attributes, function));
}

static cudaError_t set_attribute(const void *function, CUfunction_attribute attribute, int value)
{
	CUkernel kernel;
	CUdevice device;
	RT_TRY(kernel_here(function, &kernel, &device));
	return RT_CALL(cuKernelSetAttribute, attribute, value, kernel, device);
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, CUfunction_attribute attribute, int value)
{
	return rt_return(set_attribute(function, attribute, value));
}

static cudaError_t set_attribute_for_device(CUkernel kernel, CUfunction_attribute attribute, int value, int ordinal)
{
	CUdevice device;
	RT_TRY(rt_start());
	RT_TRY(RT_CALL(cuDeviceGet, &device, ordinal));
	return RT_CALL(cuKernelSetAttribute, attribute, value, kernel, device);
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(CUkernel kernel, CUfunction_attribute attribute, int value, int ordinal)
{
	return rt_return(set_attribute_for_device(kernel, attribute, value, ordinal));
}

static cudaError_t occupancy(int *blocks, const void *function, int block_size, size_t shared, unsigned int flags)
{
	CUkernel kernel;
	CUdevice device;
	CUfunction loaded;
	if (!blocks)
		return cudaErrorInvalidValue;
	RT_TRY(kernel_here(function, &kernel, &device));
	RT_TRY(RT_CALL(cuKernelGetFunction, &loaded, kernel));
	return RT_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, blocks, loaded, block_size, shared, flags);
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size, size_t shared)
{
	return rt_return(occupancy(blocks, function, block_size, shared, 0));
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int block_size, size_t shared,
									  unsigned int flags)
{
	return rt_return(occupancy(blocks, function, block_size, shared, flags));
}
