/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c - launches, in each form.
 *
 * `f<<<grid, block, shared, stream>>>(…)` compiles to: push the configuration, evaluate the arguments, call f's stub, which pops the
 * configuration and launches. Arguments may launch themselves, so configurations are a stack, one per thread. CUDA 13's stub asks once for
 * the kernel's handle (__cudaGetKernel) and launches by it; older ones launch by the stub's own address.
 */
#include "simulated_runtime/runtime.h"
#include "simulated_runtime/streams.h"

#define NESTED_LAUNCHES 32

struct configuration {
	dim3 grid, block;
	size_t shared;
	cudaStream_t stream;
};

static _Thread_local struct configuration pushed[NESTED_LAUNCHES];
static _Thread_local unsigned int depth;

/* Nonzero: the program does not call the stub. */
EXPORT unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
	if (depth == NESTED_LAUNCHES)
		return rt_return(cudaErrorInvalidConfiguration);
	pushed[depth++] = (struct configuration){ grid, block, shared, stream };
	return cudaSuccess;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, cudaStream_t *stream)
{
	if (!depth)
		return rt_return(cudaErrorMissingConfiguration);
	const struct configuration *top = &pushed[--depth];
	*grid = top->grid;
	*block = top->block;
	*shared = top->shared;
	*stream = top->stream;
	return cudaSuccess;
}

/* What the driver calls an invalid value or handle is the launch's configuration or its function here. */
static cudaError_t launch_error(cudaError_t error)
{
	if (error == cudaErrorInvalidValue)
		return cudaErrorInvalidConfiguration;
	return error == cudaErrorInvalidResourceHandle ? cudaErrorInvalidDeviceFunction : error;
}

static cudaError_t launch(CUkernel kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
	RT_TRY(rt_context());
	if (!kernel)
		return cudaErrorInvalidDeviceFunction;
	return launch_error(RT_CALL(cuLaunchKernel, (CUfunction)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
				    (unsigned int)shared, stream, arguments, NULL));
}

static cudaError_t launch_function(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
	CUkernel kernel;
	RT_TRY(rt_kernel(function, &kernel));
	return launch(kernel, grid, block, arguments, shared, stream);
}

static cudaError_t launch_cooperative(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
	CUkernel kernel;
	RT_TRY(rt_kernel(function, &kernel));
	RT_TRY(rt_context());
	return launch_error(RT_CALL(cuLaunchCooperativeKernel, (CUfunction)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
				    (unsigned int)shared, stream, arguments));
}

static cudaError_t launch_configured(const cudaLaunchConfig_t *wanted, cudaStream_t stream, const void *function, void **arguments)
{
	CUkernel kernel;
	RT_TRY(rt_kernel(function, &kernel));
	RT_TRY(rt_context());
	CUlaunchConfig config = {
		.gridDimX = wanted->gridDim.x,
		.gridDimY = wanted->gridDim.y,
		.gridDimZ = wanted->gridDim.z,
		.blockDimX = wanted->blockDim.x,
		.blockDimY = wanted->blockDim.y,
		.blockDimZ = wanted->blockDim.z,
		.sharedMemBytes = (unsigned int)wanted->dynamicSmemBytes,
		.hStream = stream,
		.attrs = wanted->attrs,
		.numAttrs = wanted->numAttrs,
	};
	return launch_error(RT_CALL(cuLaunchKernelEx, &config, (CUfunction)kernel, arguments, NULL));
}

#define LAUNCH_PARAMETERS dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream
#define LAUNCH_ARGUMENTS grid, block, arguments, shared, stream

STREAM_CALL(__cudaLaunchKernel, (CUkernel kernel, LAUNCH_PARAMETERS), launch(kernel, LAUNCH_ARGUMENTS))
STREAM_CALL(cudaLaunchKernel, (const void *function, LAUNCH_PARAMETERS), launch_function(function, LAUNCH_ARGUMENTS))
STREAM_CALL(cudaLaunchCooperativeKernel, (const void *function, LAUNCH_PARAMETERS), launch_cooperative(function, LAUNCH_ARGUMENTS))

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
	return rt_return(config ? launch_configured(config, config->stream, function, arguments) : cudaErrorInvalidConfiguration);
}

EXPORT cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
	return rt_return(config ? launch_configured(config, RT_PER_THREAD(config->stream), function, arguments)
				: cudaErrorInvalidConfiguration);
}
