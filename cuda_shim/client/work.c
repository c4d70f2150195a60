/* SPDX-License-Identifier: Apache-2.0 */
#include "client/work.h"

#include <string.h>

/* A spin on the device's nanosecond timer. The simulated driver knows the kernel by its name and reads the same argument. */
static const char image[] = ".version 7.0\n"
			    ".target sm_70\n"
			    ".address_size 64\n"
			    ".visible .entry aliquot_spin(.param .u64 microseconds)\n"
			    "{\n"
			    "  .reg .pred %again;\n"
			    "  .reg .u64 %length, %start, %end, %now;\n"
			    "  ld.param.u64 %length, [microseconds];\n"
			    "  mul.lo.u64 %length, %length, 1000;\n"
			    "  mov.u64 %start, %globaltimer;\n"
			    "  add.u64 %end, %start, %length;\n"
			    "spin:\n"
			    "  mov.u64 %now, %globaltimer;\n"
			    "  setp.lt.u64 %again, %now, %end;\n"
			    "  @%again bra spin;\n"
			    "  ret;\n"
			    "}\n"
			    ".visible .entry aliquot_burn(.param .u64 rounds, .param .u64 sink)\n"
			    "{\n"
			    "  .reg .pred %again, %unused;\n"
			    "  .reg .u64 %left, %out;\n"
			    "  .reg .f32 %x;\n"
			    "  ld.param.u64 %left, [rounds];\n"
			    "  ld.param.u64 %out, [sink];\n"
			    "  mov.f32 %x, 0f3F800000;\n"
			    "burn:\n"
			    "  fma.rn.f32 %x, %x, 0f3F7FFFFF, 0f33800000;\n"
			    "  fma.rn.f32 %x, %x, 0f3F7FFFFF, 0f33800000;\n"
			    "  fma.rn.f32 %x, %x, 0f3F7FFFFF, 0f33800000;\n"
			    "  fma.rn.f32 %x, %x, 0f3F7FFFFF, 0f33800000;\n"
			    "  sub.u64 %left, %left, 1;\n"
			    "  setp.ne.u64 %again, %left, 0;\n"
			    "  @%again bra burn;\n"
			    "  setp.eq.u64 %unused, %out, 0;\n"
			    "  @%unused bra done;\n"
			    "  st.global.f32 [%out], %x;\n" /* never taken: it keeps the arithmetic from being optimised away */
			    "done:\n"
			    "  ret;\n"
			    "}\n";

#define BURN_BLOCKS 2048 /* several waves on the largest device */
#define BURN_THREADS 256

static CUfunction spin, burn;
static CUgraphExec graph_of_spins;
static CUstream stream; /* the default one, unless the work has its own */

bool work_launch_named(const char *name, enum work_launch *launch)
{
	static const char *const names[] = {
		[WORK_KERNEL] = "kernel", [WORK_EX] = "ex", [WORK_COOPERATIVE] = "cooperative", [WORK_GRAPH] = "graph", [WORK_BURN] = "burn"
	};
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
		if (strcmp(name, names[i]) == 0) {
			*launch = (enum work_launch)i;
			return true;
		}
	return false;
}

unsigned work_kernels(enum work_launch launch)
{
	return launch == WORK_GRAPH ? WORK_GRAPH_KERNELS : 1;
}

static CUresult make_graph(const struct work *work)
{
	uint64_t kernel_us = work->kernel_us;
	void *arguments[] = { &kernel_us };
	CUDA_KERNEL_NODE_PARAMS params = { .func = spin,
					   .gridDimX = work->blocks,
					   .gridDimY = 1,
					   .gridDimZ = 1,
					   .blockDimX = 1,
					   .blockDimY = 1,
					   .blockDimZ = 1,
					   .kernelParams = arguments };
	CUgraph graph;
	CUgraphNode nodes[WORK_GRAPH_KERNELS];
	CUresult result = cu.cuGraphCreate(&graph, 0);
	for (unsigned i = 0; i < WORK_GRAPH_KERNELS && result == CUDA_SUCCESS; i++)
		result = cu.cuGraphAddKernelNode_v2(&nodes[i], graph, i ? &nodes[i - 1] : NULL, i ? 1 : 0, &params);
	return result == CUDA_SUCCESS ? cu.cuGraphInstantiateWithFlags(&graph_of_spins, graph, 0) : result;
}

CUresult work_prepare(const struct work *work)
{
	CUmodule module;
	CUresult result = cu.cuModuleLoadData(&module, image);
	if (result == CUDA_SUCCESS)
		result = cu.cuModuleGetFunction(&spin, module, "aliquot_spin");
	if (result == CUDA_SUCCESS)
		result = cu.cuModuleGetFunction(&burn, module, "aliquot_burn");
	if (result == CUDA_SUCCESS && work->own_stream)
		result = cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
	return result == CUDA_SUCCESS && work->launch == WORK_GRAPH ? make_graph(work) : result;
}

CUresult work_submit(const struct work *work)
{
	CUdeviceptr sink = 0;
	uint64_t kernel_us = work->kernel_us;
	void *arguments[] = { &kernel_us, &sink };
	CUlaunchConfig config = {
		.gridDimX = work->blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .hStream = stream
	};
	switch (work->launch) {
	case WORK_EX: return cu.cuLaunchKernelEx(&config, spin, arguments, NULL);
	case WORK_COOPERATIVE: return cu.cuLaunchCooperativeKernel(spin, work->blocks, 1, 1, 1, 1, 1, 0, stream, arguments);
	case WORK_BURN: return cu.cuLaunchKernel(burn, BURN_BLOCKS, 1, 1, BURN_THREADS, 1, 1, 0, stream, arguments, NULL);
	case WORK_GRAPH: return cu.cuGraphLaunch(graph_of_spins, stream);
	default: return cu.cuLaunchKernel(spin, work->blocks, 1, 1, 1, 1, 1, 0, stream, arguments, NULL);
	}
}
