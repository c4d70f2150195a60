/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel launches, of every kind: pay, forward, and time some of them. See pace.h. Graph launches are in launch.c. */
#include "interpose/driver.h"
#include "interpose/gate.h"
#include "interpose/pace.h"
#include "interpose/unpaced.h"

/* Each wrapper is two functions with the same arguments, so that the free path is a comparison and a jump into the driver, with the
 * arguments where they are, and the other one a jump into the paced form. Where arguments lie on the stack the compiler would load and keep
 * them first: those wrappers are in gate.S, and enter here by the paced form. */
#define PACED __attribute__((noinline)) static CUresult
#define PACED_BEHIND_GATE CUresult

#define PAY_AND_TIME(work_, launch)                                        \
	do {                                                               \
		struct aq_work work = work_;                               \
		struct aq_ticket ticket;                                   \
		CUresult result = aq_pace_begin(&ticket, &work);           \
		if (result != CUDA_SUCCESS)                                \
			return result;                                     \
		result = launch;                                           \
		aq_pace_end(&ticket, &work, result);                       \
		return result;                                             \
	} while (0)
#define PAY_FORWARD_AND_TIME(work_, call) PAY_AND_TIME(work_, aq_cuda.call)

#define GRID_PARAMETERS                                                                                                   \
	CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,        \
		unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **params
#define GRID_ARGUMENTS function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, params
#define GRID_WORK(is_per_thread)                                                                                          \
	((struct aq_work){ .function = function, .blocks = (uint64_t)grid_x * grid_y * grid_z,                            \
			   .threads = block_x * block_y * block_z, .stream = stream, .per_thread = is_per_thread })

/* A gate leads to the paced form at first, which is slower but also right; from the first launch on, it leads to the driver. */
static inline void lead_gate(void **gate, void *driver)
{
	if (__builtin_expect(__atomic_load_n(gate, __ATOMIC_RELAXED) != driver, 0) && aq_cuda_has(driver))
		__atomic_store_n(gate, driver, __ATOMIC_RELAXED);
}

/* Call it after aq_pace_begin, which binds the driver. */
#define LEAD_GATE(name) lead_gate((void **)(void *)&aq_gate_##name, (void *)aq_cuda.name)

#define LAUNCH_HOOK(name, is_per_thread)                                                          \
	PACED_BEHIND_GATE aq_paced_##name(GRID_PARAMETERS, void **extra)                          \
	{                                                                                         \
		PAY_AND_TIME(GRID_WORK(is_per_thread), (LEAD_GATE(name), aq_cuda.name(GRID_ARGUMENTS, extra))); \
	}

LAUNCH_HOOK(cuLaunchKernel, false)
LAUNCH_HOOK(cuLaunchKernel_ptsz, true)

#define COOPERATIVE_HOOK(name, is_per_thread)                                                     \
	PACED_BEHIND_GATE aq_paced_##name(GRID_PARAMETERS)                                        \
	{                                                                                         \
		PAY_AND_TIME(GRID_WORK(is_per_thread), (LEAD_GATE(name), aq_cuda.name(GRID_ARGUMENTS))); \
	}

COOPERATIVE_HOOK(cuLaunchCooperativeKernel, false)
COOPERATIVE_HOOK(cuLaunchCooperativeKernel_ptsz, true)

#define LAUNCH_EX_HOOK(name, is_per_thread)                                                                       \
	PACED paced_##name(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)        \
	{                                                                                                         \
		if (!config)                                                                                      \
			return aq_cuda.name(config, function, params, extra);                                     \
		PAY_FORWARD_AND_TIME(((struct aq_work){                                                           \
			.function = function,                                                                     \
			.blocks = (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ,               \
			.threads = config->blockDimX * config->blockDimY * config->blockDimZ,                     \
			.stream = config->hStream, .per_thread = is_per_thread }),                                \
			name(config, function, params, extra));                                                   \
	}                                                                                                         \
	CUresult name(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)             \
	{                                                                                                         \
		if (aq_unpaced())                                                                               \
			return aq_cuda.name(config, function, params, extra);                                     \
		return paced_##name(config, function, params, extra);                                             \
	}

LAUNCH_EX_HOOK(cuLaunchKernelEx, false)
LAUNCH_EX_HOOK(cuLaunchKernelEx_ptsz, true)

/* One kernel per device, launched as one. Each is paid for and timed in its own stream's context. */
static CUresult launch_on_all(CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags)
{
	struct aq_work works[AQ_MAX_DEVICES];
	struct aq_ticket tickets[AQ_MAX_DEVICES];
	CUresult result = CUDA_SUCCESS;
	unsigned int begun = 0;

	while (result == CUDA_SUCCESS && begun < count) {
		const CUDA_LAUNCH_PARAMS *launch = &launches[begun];

		works[begun] = (struct aq_work){ .function = launch->function,
						 .blocks = (uint64_t)launch->gridDimX * launch->gridDimY * launch->gridDimZ,
						 .threads = launch->blockDimX * launch->blockDimY * launch->blockDimZ,
						 .stream = launch->hStream };
		result = aq_pace_begin(&tickets[begun], &works[begun]);
		begun += result == CUDA_SUCCESS;
	}
	if (result == CUDA_SUCCESS)
		result = aq_cuda.cuLaunchCooperativeKernelMultiDevice(launches, count, flags);
	while (begun-- > 0)
		aq_pace_end(&tickets[begun], &works[begun], result);
	return result;
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags)
{
	if (aq_unpaced() || !launches || count > AQ_MAX_DEVICES) /* one launch for each device at most: more the driver refuses */
		return aq_cuda.cuLaunchCooperativeKernelMultiDevice(launches, count, flags);
	return launch_on_all(launches, count, flags);
}

/* The forms of CUDA 3: the block shape is part of the function's state, so only the grid distinguishes launches. */
CUresult cuLaunch(CUfunction function)
{
	if (aq_unpaced())
		return aq_cuda.cuLaunch(function);
	PAY_FORWARD_AND_TIME(((struct aq_work){ .function = function, .blocks = 1 }), cuLaunch(function));
}

CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
	if (aq_unpaced())
		return aq_cuda.cuLaunchGrid(function, width, height);
	PAY_FORWARD_AND_TIME(((struct aq_work){ .function = function, .blocks = (uint64_t)width * (uint64_t)height }),
			     cuLaunchGrid(function, width, height));
}

CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
	if (aq_unpaced())
		return aq_cuda.cuLaunchGridAsync(function, width, height, stream);
	PAY_FORWARD_AND_TIME(((struct aq_work){ .function = function, .blocks = (uint64_t)width * (uint64_t)height, .stream = stream }),
			     cuLaunchGridAsync(function, width, height, stream));
}
