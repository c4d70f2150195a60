/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_work.c - streams, events and simulated time, graphs and capture, finding entry points, faults, visibility and fork. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulated_driver/tests/harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

#define HOLD_SECONDS 0.5        /* a busy machine keeps a process from its processor for less than that */
#define LATE_SECONDS 3          /* and a program that does not wait is done by then */

/* ---- simulated time -------------------------------------------------------------------------------------------------- */

static float elapsed_ms(CUevent from, CUevent to)
{
	float ms;
	OK(cuEventElapsedTime(&ms, from, to));
	return ms;
}

static CUevent event(void)
{
	CUevent created;
	OK(cuEventCreate(&created, CU_EVENT_DEFAULT));
	return created;
}

/* Keep the stream busy, so that all that a case queues next is there before the first of it begins: its simulated times are exact then. */
static void hold(CUstream stream)
{
	OK(test_launch(test_spin(), (uint64_t)(HOLD_SECONDS * 1e6), stream));
}

static void kernels_take_their_time(void)
{
	test_context(0);
	CUfunction spin = test_spin();
	CUevent begin = event(), end = event();
	double start = test_seconds();
	hold(NULL);
	OK(cuEventRecord(begin, NULL));
	for (int i = 0; i < 10; i++)
		OK(test_launch(spin, 5000, NULL));
	OK(cuEventRecord(end, NULL));
	CHECK_EQUAL(cuEventQuery(begin), CUDA_ERROR_NOT_READY);     /* a launch does not wait */
	OK(cuStreamSynchronize(NULL));
	CHECK_BETWEEN(test_seconds() - start, HOLD_SECONDS + 0.05, HOLD_SECONDS + 0.05 + LATE_SECONDS);
	CHECK_BETWEEN(elapsed_ms(begin, end), 49.99, 51);
	CHECK_EQUAL(cuEventQuery(end), CUDA_SUCCESS);
}

static void annotated_and_plain_kernels_have_durations(void)
{
	CUmodule module;
	CUfunction slow, plain;
	test_context(0);
	CUevent a = event(), b = event(), c = event();
	OK(cuModuleLoadData(&module,
			    "// aliquot-sim: slow duration_us=1500\n.version 8.0\n.visible .entry slow()\n{}\n\t.entry plain(\n)\n{}\n"));
	OK(cuModuleGetFunction(&slow, module, "slow"));
	OK(cuModuleGetFunction(&plain, module, "plain"));
	CHECK_EQUAL(cuModuleGetFunction(&plain, module, "missing"), CUDA_ERROR_NOT_FOUND);
	OK(cuModuleGetFunction(&plain, module, "plain"));
	hold(NULL);
	OK(cuEventRecord(a, NULL));
	OK(cuLaunchKernel(slow, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
	OK(cuEventRecord(b, NULL));
	OK(cuLaunchKernel(plain, 40 * 4 * 3, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL));     /* three waves on 40 SMs with 4 blocks each */
	OK(cuEventRecord(c, NULL));
	OK(cuCtxSynchronize());
	CHECK_BETWEEN(elapsed_ms(a, b), 1.499, 1.501);
	CHECK_BETWEEN(elapsed_ms(b, c), 0.0149, 0.0151);
	CHECK_EQUAL(cuLaunchKernel(plain, 1, 1, 1, 1025, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuLaunchKernel(plain, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuLaunchCooperativeKernel(plain, 1 << 20, 1, 1, 256, 1, 1, 0, NULL, NULL), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
}

static void invalid_images_are_refused(void)
{
	CUmodule module;
	test_context(0);
	CHECK_EQUAL(cuModuleLoadData(&module, "\177ELF..."), CUDA_ERROR_INVALID_IMAGE);
	CHECK_EQUAL(cuModuleLoadData(&module, "int main() {}"), CUDA_ERROR_INVALID_PTX);
	CHECK_EQUAL(cuModuleLoadData(&module, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuModuleLoad(&module, "/nonexistent"), CUDA_ERROR_FILE_NOT_FOUND);
}

static void module_variables_have_device_memory(void)
{
	CUmodule module;
	CUdeviceptr address;
	size_t bytes;
	test_context(0);
	OK(cuModuleLoadData(&module, ".visible .global .align 4 .b8 table[4096];\n.global .u64 counter;\n.entry k()\n"));
	OK(cuModuleGetGlobal_v2(&address, &bytes, module, "table"));
	CHECK_EQUAL(bytes, 4096);
	OK(cuMemsetD8_v2(address, 1, bytes));
	OK(cuModuleGetGlobal_v2(&address, &bytes, module, "counter"));
	CHECK_EQUAL(bytes, 8);
	CHECK_EQUAL(cuModuleGetGlobal_v2(&address, &bytes, module, "other"), CUDA_ERROR_NOT_FOUND);
	OK(cuModuleUnload(module));
	CHECK_EQUAL(cuMemsetD8_v2(address, 1, 8), CUDA_ERROR_INVALID_VALUE);
}

static void full_queue_makes_launches_wait(void)
{
	test_context(0);
	CUfunction spin = test_spin();
	CUevent held = event();
	double start = test_seconds();
	hold(NULL);
	OK(cuEventRecord(held, NULL));
	for (int i = 2; i < 1024; i++)
		OK(test_launch(spin, 100, NULL));
	CHECK_EQUAL(cuEventQuery(held), CUDA_ERROR_NOT_READY);
	OK(test_launch(spin, 100, NULL));
	CHECK_EQUAL(cuEventQuery(held), CUDA_SUCCESS);      /* the first one in the queue had to end */
	OK(cuCtxSynchronize());
	CHECK_BETWEEN(test_seconds() - start, HOLD_SECONDS + 0.1, HOLD_SECONDS + 0.1 + LATE_SECONDS);
}

static void streams_wait_only_for_what_they_must(void)
{
	CUstream fast, other;
	test_context(0);
	CUevent mark = event();
	OK(cuStreamCreate(&fast, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	hold(other);
	OK(cuEventRecord(mark, other));
	OK(cuStreamSynchronize(fast));
	CHECK_EQUAL(cuStreamQuery(fast), CUDA_SUCCESS);
	CHECK_EQUAL(cuStreamQuery(other), CUDA_ERROR_NOT_READY);
	OK(cuStreamWaitEvent(fast, mark, 0));
	CHECK_EQUAL(cuStreamQuery(fast), CUDA_ERROR_NOT_READY);
	OK(cuStreamSynchronize(fast));
	CHECK_EQUAL(cuStreamQuery(other), CUDA_SUCCESS);
}

static void legacy_stream_orders_blocking_streams(void)
{
	CUstream blocking, apart;
	test_context(0);
	CUevent a = event(), b = event();
	OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	OK(cuStreamCreate(&apart, CU_STREAM_NON_BLOCKING));
	hold(blocking);
	OK(cuEventRecord(a, blocking));
	OK(cuEventRecord(b, NULL));             /* behind the blocking stream's work, though in another stream */
	CHECK_EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
	CHECK_EQUAL(cuStreamQuery(apart), CUDA_SUCCESS);
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(cuStreamQuery(blocking), CUDA_SUCCESS);
	CHECK_BETWEEN(elapsed_ms(a, b), 0, 0.001);
}

static void per_thread_twin_uses_another_stream(void)
{
	unsigned long long legacy, own, again;
	test_context(0);
	OK(cuStreamGetId(NULL, &legacy));
	OK(cuStreamGetId_ptsz(NULL, &own));
	OK(cuStreamGetId(CU_STREAM_PER_THREAD, &again));
	CHECK(legacy != own);
	CHECK_EQUAL(own, again);
	OK(cuStreamGetId_ptsz(CU_STREAM_LEGACY, &again));
	CHECK_EQUAL(legacy, again);
}

static void add_one(void *counter)
{
	atomic_fetch_add((_Atomic uint32_t *)counter, 1);
}

static void wait_for_two(void *counter)
{
	double deadline = test_seconds() + 5;
	while (atomic_load((_Atomic uint32_t *)counter) != 2 && test_seconds() < deadline)
		test_sleep_ms(1);
	add_one(counter);
}

static void host_functions_run_in_stream_order_and_block_only_their_stream(void)
{
	static _Atomic uint32_t counter;
	CUstream a, b;
	test_context(0);
	CUfunction spin = test_spin();
	OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	OK(cuLaunchHostFunc(a, wait_for_two, (void *)(uintptr_t)&counter));
	OK(test_launch(spin, 1000, a));
	OK(test_launch(spin, 1000, b));
	OK(cuStreamSynchronize(b));
	CHECK_EQUAL(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
	add_one((void *)(uintptr_t)&counter);
	add_one((void *)(uintptr_t)&counter);
	OK(cuStreamSynchronize(a));
	CHECK_EQUAL(atomic_load(&counter), 3);
}

static void event_of_one_device_holds_a_stream_of_another(void)
{
	CUcontext first = test_context(0), second;
	CUstream a, b;
	CUfunction spin = test_spin();
	CUevent mark = event();
	OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	OK(cuCtxCreate_v2(&second, 0, 1));
	OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	double start = test_seconds();
	OK(test_launch(spin, 50000, a));
	OK(cuEventRecord(mark, a));
	OK(cuStreamWaitEvent(b, mark, 0));
	OK(cuStreamSynchronize(b));
	CHECK_BETWEEN(test_seconds() - start, 0.05, 0.05 + LATE_SECONDS);
	OK(cuCtxSetCurrent(first));
	CHECK_EQUAL(cuStreamQuery(a), CUDA_SUCCESS);
}

/* ---- sharing the SMs ------------------------------------------------------------------------------------------------- */

struct runner {
	_Atomic uint32_t *barrier;
	double *finished;
	double busy_seconds;
};

static void run_kernels(void *argument)
{
	struct runner *runner = argument;
	test_context(0);
	CUfunction spin = test_spin();
	atomic_fetch_add(runner->barrier, 1);
	test_await(runner->barrier, 2);
	double start = test_seconds();
	for (int i = 0; i < (int)(runner->busy_seconds * 1000); i++)
		OK(test_launch(spin, 1000, NULL));
	OK(cuCtxSynchronize());
	*runner->finished = test_seconds() - start;
}

static void two_processes_share_the_sms_equally(void)
{
	struct runner runners[2];
	pid_t children[2];
	for (int i = 0; i < 2; i++)
		runners[i] = (struct runner){ i ? runners[0].barrier : test_shared(4), test_shared(sizeof(double)), 0.5 };
	for (int i = 0; i < 2; i++)
		children[i] = test_spawn(run_kernels, &runners[i]);
	for (int i = 0; i < 2; i++)
		test_reap(children[i], 0);
	for (int i = 0; i < 2; i++)     /* half a second of work each takes both one second, less what one begins late */
		CHECK_BETWEEN(*runners[i].finished, 0.8, 1 + LATE_SECONDS);
	CHECK_BETWEEN(*runners[0].finished / *runners[1].finished, 0.75, 1.33);
}

struct turns {
	_Atomic uint32_t *barrier;
	double *began, *ended;
};

static void run_kernels_one_by_one(void *argument)
{
	struct turns *turns = argument;
	test_context(0);
	CUfunction spin = test_spin();
	atomic_fetch_add(turns->barrier, 1);
	test_await(turns->barrier, 2);
	*turns->began = test_seconds();
	for (int i = 0; i < 150; i++) {
		OK(test_launch(spin, 1000, NULL));
		OK(cuCtxSynchronize());
	}
	*turns->ended = test_seconds();
}

/* Work that often stops and starts is where the shares of two processes could add up to more than one device. */
static void two_processes_never_get_more_than_one_gpu(void)
{
	struct turns turns[2];
	pid_t children[2];
	for (int i = 0; i < 2; i++)
		turns[i] = (struct turns){ i ? turns[0].barrier : test_shared(4), test_shared(sizeof(double)),
					   test_shared(sizeof(double)) };
	for (int i = 0; i < 2; i++)
		children[i] = test_spawn(run_kernels_one_by_one, &turns[i]);
	for (int i = 0; i < 2; i++)
		test_reap(children[i], 0);
	double began = *turns[0].began < *turns[1].began ? *turns[0].began : *turns[1].began;
	double ended = *turns[0].ended > *turns[1].ended ? *turns[0].ended : *turns[1].ended;
	CHECK(ended - began > 0.29);    /* two times 0.15 s of SM time */
}

/* Another process's slot, as its engine leaves it. */
static struct sim_slot_gpu *neighbour(void)
{
	test_context(0);
	CHECK_EQUAL(atomic_load(&test_state()->slots_high), 1);
	struct sim_slot_gpu *held = &test_state()->slots[1].gpus[0];
	atomic_store(&held->mig_device, SIM_WHOLE_GPU);
	atomic_store(&test_state()->slots_high, 2);
	return held;
}

#define NEVER UINT64_MAX

static void check_sharers(uint64_t at_ns, uint32_t sharers, uint64_t until_ns)
{
	uint64_t until = NEVER;
	CHECK_EQUAL(sim_sm_sharers(test_state(), 0, 0, at_ns, &until), sharers);
	CHECK_EQUAL(until, until_ns);
}

static void kernels_of_others_end_on_time_without_a_query(void)
{
	struct sim_slot_gpu *other = neighbour();
	const uint64_t ms = 1000000;
	atomic_store(&other->before_since_ns, 1000 * ms);
	atomic_store(&other->before_end_ns, 1004 * ms);
	atomic_store(&other->kernels_since_ns, 1010 * ms);
	atomic_store(&other->kernels_told_ns, 1012 * ms);
	atomic_store(&other->kernels_left_ns, 3 * ms);      /* with one other: six */
	check_sharers(999 * ms, 1, 1000 * ms);
	check_sharers(1000 * ms, 2, 1004 * ms);
	check_sharers(1004 * ms, 1, 1010 * ms);
	check_sharers(1010 * ms, 2, 1018 * ms);
	check_sharers(1018 * ms, 1, NEVER);
	atomic_store(&other->kernels_left_ns, 3600 * 1000 * ms);
	check_sharers(1018 * ms, 2, 1012 * ms + SIM_STALL_NS);
	check_sharers(1012 * ms + SIM_STALL_NS, 1, NEVER);   /* it was stopped, or killed */
	atomic_store(&other->mig_device, 0);
	check_sharers(1018 * ms, 1, NEVER);
}

static void busy_time_is_accounted(void)
{
	test_context(0);
	CUfunction spin = test_spin();
	for (int i = 0; i < 300; i++)
		OK(test_launch(spin, 1000, NULL));
	OK(cuCtxSynchronize());
	uint64_t busy = sim_gpu_busy_ns(test_state(), 0, SIM_WHOLE_GPU, sim_now_ns(), 1000000000u);
	CHECK_BETWEEN(busy / 1e6, 299, 301);
	CHECK_EQUAL(sim_gpu_busy_ns(test_state(), 1, SIM_WHOLE_GPU, sim_now_ns(), 1000000000u), 0);
}

/* ---- graphs and capture ---------------------------------------------------------------------------------------------- */

static void captured_work_runs_when_launched(void)
{
	CUstream stream, side;
	CUgraph graph;
	CUgraphExec exec;
	CUdeviceptr memory;
	CUstreamCaptureStatus status;
	size_t count = 0;
	uint32_t out = 0;
	test_context(0);
	CUfunction spin = test_spin();
	CUevent fork_mark = event(), join_mark = event(), begin = event(), end = event();
	OK(cuMemAlloc_v2(&memory, 64));
	OK(cuMemsetD32_v2(memory, 0, 16));
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(test_launch(spin, 2000, stream));
	OK(cuEventRecord(fork_mark, stream));
	OK(cuStreamWaitEvent(side, fork_mark, 0));
	OK(cuStreamIsCapturing(side, &status));
	CHECK_EQUAL(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
	OK(cuMemsetD32Async(memory, 17, 1, side));
	OK(test_launch(spin, 3000, side));
	OK(cuEventRecord(join_mark, side));
	OK(cuStreamWaitEvent(stream, join_mark, 0));
	OK(cuStreamEndCapture(stream, &graph));
	OK(cuStreamIsCapturing(side, &status));
	CHECK_EQUAL(status, CU_STREAM_CAPTURE_STATUS_NONE);
	OK(cuGraphGetNodes(graph, NULL, &count));
	CHECK_EQUAL(count, 3);
	OK(cuMemcpyDtoH_v2(&out, memory, 4));
	CHECK_EQUAL(out, 0);
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	hold(stream);
	OK(cuEventRecord(begin, stream));
	OK(cuGraphLaunch(exec, stream));
	OK(cuEventRecord(end, stream));
	OK(cuStreamSynchronize(stream));
	CHECK_BETWEEN(elapsed_ms(begin, end), 4.999, 5.5);
	OK(cuMemcpyDtoH_v2(&out, memory, 4));
	CHECK_EQUAL(out, 17);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
}

static void capture_is_invalidated_by_what_it_does_not_allow(void)
{
	CUstream stream, side;
	CUgraph graph;
	CUdeviceptr memory;
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	test_context(0);
	CUevent mark = event();
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
	CHECK_EQUAL(cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_ILLEGAL_STATE);

	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CHECK_EQUAL(cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CHECK_EQUAL(cuMemAlloc_v2(&memory, 1), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

	CUevent elsewhere = event();
	OK(cuEventRecord(elsewhere, side));
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CHECK_EQUAL(cuEventQuery(elsewhere), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuMemAlloc_v2(&memory, 1));
	OK(cuEventRecord(mark, stream));
	CHECK_EQUAL(cuEventQuery(mark), CUDA_ERROR_CAPTURED_EVENT);
	OK(cuStreamWaitEvent(side, mark, 0));
	OK(cuMemsetD8Async(memory, 1, 1, side));
	CHECK_EQUAL(cuStreamEndCapture(side, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

	OK(cuThreadExchangeStreamCaptureMode(&mode));
	CHECK_EQUAL(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	OK(cuMemAlloc_v2(&memory, 1));          /* this thread has said that it knows what it does */
	OK(cuStreamEndCapture(stream, &graph));
	OK(cuGraphDestroy(graph));
}

static void graphs_are_built_updated_and_cloned(void)
{
	CUgraph graph, other, clone;
	CUgraphExec exec;
	CUgraphNode first, second, empty, found, nodes[4];
	CUgraphExecUpdateResultInfo info;
	size_t count = COUNT(nodes);
	uint64_t microseconds = 1000;
	void *parameters[] = { &microseconds };
	CUcontext context = test_context(0);
	CUDA_KERNEL_NODE_PARAMS kernel = { .func = test_spin(),
					   .gridDimX = 1,
					   .gridDimY = 1,
					   .gridDimZ = 1,
					   .blockDimX = 1,
					   .blockDimY = 1,
					   .blockDimZ = 1,
					   .kernelParams = parameters,
					   .ctx = context };
	CUevent begin = event(), end = event();
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddKernelNode_v2(&first, graph, NULL, 0, &kernel));
	OK(cuGraphAddEmptyNode(&empty, graph, &first, 1));
	CUgraphNodeParams any = { .type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = kernel };
	OK(cuGraphAddNode_v2(&second, graph, &empty, NULL, 1, &any));
	OK(cuGraphGetRootNodes(graph, nodes, &count));
	CHECK(count == 1 && nodes[0] == first);
	count = COUNT(nodes);
	OK(cuGraphNodeGetDependentNodes(empty, nodes, &count));
	CHECK(count == 1 && nodes[0] == second);
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));

	microseconds = 4000;
	OK(cuGraphExecKernelNodeSetParams_v2(exec, second, &kernel));
	hold(NULL);
	OK(cuEventRecord(begin, NULL));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuEventRecord(end, NULL));
	OK(cuStreamSynchronize(NULL));
	CHECK_BETWEEN(elapsed_ms(begin, end), 4.99, 5.5);

	OK(cuGraphClone(&clone, graph));
	OK(cuGraphNodeFindInClone(&found, second, clone));
	OK(cuGraphKernelNodeSetParams_v2(found, &kernel));
	OK(cuGraphExecUpdate_v2(exec, clone, &info));
	OK(cuGraphNodeSetEnabled(exec, first, 0));
	hold(NULL);
	OK(cuEventRecord(begin, NULL));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuEventRecord(end, NULL));
	OK(cuStreamSynchronize(NULL));
	CHECK_BETWEEN(elapsed_ms(begin, end), 3.99, 4.5);

	OK(cuGraphCreate(&other, 0));
	OK(cuGraphAddEmptyNode(&empty, other, NULL, 0));
	CHECK_EQUAL(cuGraphExecUpdate_v2(exec, other, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	CHECK_EQUAL(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED);
	OK(cuGraphAddDependencies(graph, &second, &first, 1));
	CHECK_EQUAL(cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_ERROR_INVALID_VALUE);     /* a cycle */
}

/* ---- finding entry points -------------------------------------------------------------------------------------------- */

static void *lookup(const char *name, int version, cuuint64_t flags, int expected_status)
{
	void *function = NULL;
	CUdriverProcAddressQueryResult status;
	OK(cuGetProcAddress_v2(name, &function, version, flags, &status));
	CHECK_EQUAL(status, expected_status);
	return function;
}

static void entry_points_are_found_by_version_and_stream(void)
{
	void *function;
	CHECK(lookup("cuMemAlloc", 2000, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuMemAlloc);
	CHECK(lookup("cuMemAlloc", 3020, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuMemAlloc_v2);
	CHECK(lookup("cuMemAlloc", 13000, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuMemAlloc_v2);
	CHECK(lookup("cuCtxCreate", 12040, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuCtxCreate_v3);
	CHECK(lookup("cuCtxCreate", 13000, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuCtxCreate_v4);
	CHECK(lookup("cuGraphInstantiate", 11000, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuGraphInstantiate_v2);
	CHECK(lookup("cuGraphInstantiate", 12000, 0, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuGraphInstantiateWithFlags);
	CHECK(lookup("cuMemcpyHtoD", 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)cuMemcpyHtoD_v2);
	CHECK(lookup("cuMemcpyHtoD", 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, CU_GET_PROC_ADDRESS_SUCCESS) ==
	      (void *)cuMemcpyHtoD_v2_ptds);
	CHECK(lookup("cuMemcpyHtoD", 6050, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, CU_GET_PROC_ADDRESS_SUCCESS) ==
	      (void *)cuMemcpyHtoD_v2);
	CHECK(lookup("cuLaunchKernel", 7000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, CU_GET_PROC_ADDRESS_SUCCESS) ==
	      (void *)cuLaunchKernel_ptsz);
	CHECK(lookup("cuMemCreate", 10010, 0, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT) == NULL);
	CHECK(lookup("cuMemAlloc_v2", 13000, 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) == NULL);
	CHECK(lookup("cuNoSuchThing", 13000, 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) == NULL);
	CHECK_EQUAL(cuGetProcAddress_v2("cuInit", &function, 13010, 0, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuGetProcAddress("cuNoSuchThing", &function, 12000, 0), CUDA_ERROR_NOT_FOUND);
	OK(cuGetProcAddress("cuInit", &function, 12000, 0));
	CHECK(function == (void *)cuInit);
}

static void on_message(void *data, CUlogLevel level, char *message, size_t length)
{
	(void)data, (void)level, (void)message, (void)length;
}

static void log_of_the_driver_is_empty(void)
{
	CUlogsCallbackHandle handle;
	CUlogIterator position;
	char text[64] = "unchanged";
	size_t size = sizeof text;
	OK(cuLogsRegisterCallback(on_message, NULL, &handle));
	OK(cuLogsCurrent(&position, 0));
	CHECK_EQUAL(cuInit(1), CUDA_ERROR_INVALID_VALUE);
	OK(cuLogsDumpToMemory(&position, text, &size, 0));
	CHECK_EQUAL(size, 0);
	CHECK_EQUAL(text[0], '\0');
	OK(cuLogsUnregisterCallback(handle));
	CHECK_EQUAL(cuLogsUnregisterCallback(handle), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuLogsRegisterCallback(NULL, NULL, &handle), CUDA_ERROR_INVALID_VALUE);
}

static void private_tables_are_refused(void)
{
	const void *table = &table;
	CUuuid id = { { 1 } };
	OK(cuInit(0));
	CHECK_EQUAL(cuGetExportTable(&table, &id), CUDA_ERROR_INVALID_VALUE);
	CHECK(table == NULL);
}

/* ---- faults ---------------------------------------------------------------------------------------------------------- */

static void gpu_lost_under_way_ends_the_context(void)
{
	CUcontext context = test_context(0), other;
	CUdeviceptr memory;
	CUfunction spin = test_spin();
	OK(test_launch(spin, 10000000, NULL));
	sim_fault_set_lost(test_state(), 0, true);
	CHECK_EQUAL(cuMemAlloc_v2(&memory, 1), CUDA_ERROR_LAUNCH_FAILED);
	CHECK_EQUAL(cuStreamSynchronize(NULL), CUDA_ERROR_LAUNCH_FAILED);
	CHECK_EQUAL(cuCtxCreate_v2(&other, 0, 0), CUDA_ERROR_DEVICE_UNAVAILABLE);
	OK(cuCtxCreate_v2(&other, 0, 1));       /* the other GPU is well */
	OK(cuMemAlloc_v2(&memory, 1));
	sim_fault_set_lost(test_state(), 0, false);
	OK(cuCtxSetCurrent(context));
	CHECK_EQUAL(cuMemAlloc_v2(&memory, 1), CUDA_ERROR_LAUNCH_FAILED);
	CHECK_EQUAL(cuCtxDestroy_v2(context), CUDA_ERROR_LAUNCH_FAILED);
	CHECK_EQUAL(cuCtxDestroy_v2(context), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	OK(cuCtxCreate_v2(&other, 0, 0));
	OK(cuMemAlloc_v2(&memory, 1));
	CHECK_EQUAL(atomic_load(&test_state()->gpus[0].xid_sequence), 1);
	CHECK_EQUAL(test_state()->gpus[0].xids[1].xid, 79);
}

static void lost_and_back_unnoticed_still_ends_the_context(void)
{
	CUdeviceptr memory;
	test_context(0);
	sim_fault_set_lost(test_state(), 0, true);
	sim_fault_set_lost(test_state(), 0, false);
	CHECK_EQUAL(cuMemAlloc_v2(&memory, 1), CUDA_ERROR_UNKNOWN);
}

static void memory_error_ends_the_contexts_of_its_time(void)
{
	CUcontext later;
	CUdeviceptr memory;
	CUcontext context = test_context(0);
	sim_fault_ecc(test_state(), 0, false, 5);
	OK(cuMemAlloc_v2(&memory, 1));
	sim_fault_ecc(test_state(), 0, true, 1);
	CHECK_EQUAL(cuMemAlloc_v2(&memory, 1), CUDA_ERROR_ECC_UNCORRECTABLE);
	CHECK_EQUAL(cuCtxDestroy_v2(context), CUDA_ERROR_ECC_UNCORRECTABLE);
	OK(cuCtxCreate_v2(&later, 0, 0));
	OK(cuMemAlloc_v2(&memory, 1));
}

static void ending_a_faulty_primary_context_returns_the_fault(void)
{
	CUresult (*const ends[])(CUdevice) = { cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxReset_v2 };
	OK(cuInit(0));
	for (unsigned i = 0; i < 2; i++) {
		CUcontext context;
		unsigned flags;
		int active;
		OK(cuDevicePrimaryCtxRetain(&context, 0));
		OK(cuDevicePrimaryCtxRetain(&context, 0));
		sim_fault_ecc(test_state(), 0, true, 1);
		OK(cuDevicePrimaryCtxRelease_v2(0));    /* not the last reference */
		CHECK_EQUAL(ends[i](0), CUDA_ERROR_ECC_UNCORRECTABLE);
		OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
		CHECK_EQUAL(active, 0);
		CHECK_EQUAL(test_used(0), 0);
	}
}

static void hang_delays_every_call_until_it_is_lifted(void)
{
	test_context(0);
	sim_fault_set_hang(test_state(), 0, 150);
	double start = test_seconds();
	test_free_bytes();
	CHECK_BETWEEN(test_seconds() - start, 0.15, 0.15 + LATE_SECONDS);
	sim_fault_set_hang(test_state(), 0, 0);
	start = test_seconds();
	for (int i = 0; i < 100; i++)
		test_free_bytes();
	CHECK_BETWEEN(test_seconds() - start, 0, LATE_SECONDS);     /* 100 delayed calls take 15 s */
}

static void mismatched_driver_does_not_initialise(void)
{
	sim_fault_set_mismatch(test_state(), true);
	CHECK_EQUAL(cuInit(0), CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
	sim_fault_set_mismatch(test_state(), false);
	OK(cuInit(0));
}

static void compute_mode_is_honoured(void)
{
	CUcontext context;
	OK(cuInit(0));
	atomic_store(&test_state()->settings.gpus[0].compute_mode, CU_COMPUTEMODE_PROHIBITED);
	CHECK_EQUAL(cuCtxCreate_v2(&context, 0, 0), CUDA_ERROR_DEVICE_UNAVAILABLE);
	atomic_store(&test_state()->settings.gpus[0].compute_mode, CU_COMPUTEMODE_EXCLUSIVE_PROCESS);
	OK(cuCtxCreate_v2(&context, 0, 0));
	OK(cuCtxCreate_v2(&context, 0, 0));
}

/* ---- processes ------------------------------------------------------------------------------------------------------- */

static void forked_child_of_an_initialised_process_has_no_cuda(void)
{
	CUdeviceptr memory;
	int status;
	test_context(0);
	OK(cuMemAlloc_v2(&memory, 1));
	pid_t child = fork();
	if (child == 0) {
		CUcontext context;
		int count;
		bool right = cuMemAlloc_v2(&memory, 1) == CUDA_ERROR_NOT_INITIALIZED && cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
			     cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
			     cuCtxGetCurrent(&context) == CUDA_ERROR_NOT_INITIALIZED;
		_exit(right ? 0 : 1);
	}
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	CHECK_EQUAL(status, 0);
	OK(cuMemFree_v2(memory));
}

/* Threads of the driver, which names them. */
static unsigned driver_threads(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *task;
	unsigned count = 0;
	CHECK(tasks != NULL);
	while ((task = readdir(tasks))) {
		char path[300], name[32] = "";
		snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
		FILE *file = fopen(path, "r");
		if (!file)
			continue;
		count += fgets(name, sizeof name, file) && strcmp(name, "cuda-sim\n") == 0;
		fclose(file);
	}
	closedir(tasks);
	return count;
}

static void no_thread_and_no_slot_before_the_first_context(void)
{
	int count;
	OK(cuInit(0));
	OK(cuDeviceGetCount(&count));
	CHECK_EQUAL(driver_threads(), 0);
	CHECK_EQUAL(atomic_load(&test_state()->slots_high), 0);
	test_context(0);
	for (int i = 0; i < 1000 && driver_threads() == 0; i++)
		test_sleep_ms(1);
	CHECK_EQUAL(driver_threads(), 1);
	CHECK_EQUAL(atomic_load(&test_state()->slots_high), 1);
}

static void devices_are_chosen_by_the_environment(void)
{
	const struct sim_topology *topology = &test_state()->topology;
	char wish[256];
	CUuuid uuid;
	int count, bus;
	setenv("ALIQUOT_SIM_DEVICE_a", topology->gpus[5].uuid, 1);
	setenv("ALIQUOT_SIM_DEVICE_b", topology->gpus[2].uuid, 1);
	setenv("ALIQUOT_SIM_DEVICE_c", topology->gpus[3].uuid, 1);
	snprintf(wish, sizeof wish, "2,%.12s,17,0", topology->gpus[2].uuid);
	setenv("CUDA_VISIBLE_DEVICES", wish, 1);
	OK(cuInit(0));
	OK(cuDeviceGetCount(&count));
	CHECK_EQUAL(count, 2);                  /* 17 matches no device and ends the list */
	OK(cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0));
	CHECK_EQUAL(bus, topology->gpus[5].pci.bus);
	OK(cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1));
	CHECK_EQUAL(bus, topology->gpus[2].pci.bus);
	OK(cuDeviceGetUuid_v2(&uuid, 1));
	snprintf(wish, sizeof wish, "GPU-%02hhx%02hhx", (unsigned char)uuid.bytes[0], (unsigned char)uuid.bytes[1]);
	CHECK(strncmp(wish, topology->gpus[2].uuid, 8) == 0);
}

static void no_visible_device_is_no_device(void)
{
	setenv("ALIQUOT_SIM_DEVICE_0", "GPU-00000000-0000-0000-0000-000000000000", 1);
	CHECK_EQUAL(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

static const struct test_case cases[] = {
	CASE(kernels_take_their_time, "t4x2"),
	CASE(annotated_and_plain_kernels_have_durations, "t4x2"),
	CASE(invalid_images_are_refused, "t4x2"),
	CASE(module_variables_have_device_memory, "t4x2"),
	CASE(full_queue_makes_launches_wait, "t4x2"),
	CASE(streams_wait_only_for_what_they_must, "t4x2"),
	CASE(legacy_stream_orders_blocking_streams, "t4x2"),
	CASE(per_thread_twin_uses_another_stream, "t4x2"),
	CASE(host_functions_run_in_stream_order_and_block_only_their_stream, "t4x2"),
	CASE(event_of_one_device_holds_a_stream_of_another, "t4x2"),
	CASE(two_processes_share_the_sms_equally, "t4x2"),
	CASE(two_processes_never_get_more_than_one_gpu, "t4x2"),
	CASE(kernels_of_others_end_on_time_without_a_query, "t4x2"),
	CASE(busy_time_is_accounted, "t4x2"),
	CASE(captured_work_runs_when_launched, "t4x2"),
	CASE(capture_is_invalidated_by_what_it_does_not_allow, "t4x2"),
	CASE(graphs_are_built_updated_and_cloned, "t4x2"),
	CASE(entry_points_are_found_by_version_and_stream, "t4x2"),
	CASE(log_of_the_driver_is_empty, "t4x2"),
	CASE(private_tables_are_refused, "t4x2"),
	CASE(gpu_lost_under_way_ends_the_context, "t4x2"),
	CASE(lost_and_back_unnoticed_still_ends_the_context, "t4x2"),
	CASE(memory_error_ends_the_contexts_of_its_time, "t4x2"),
	CASE(ending_a_faulty_primary_context_returns_the_fault, "t4x2"),
	CASE(hang_delays_every_call_until_it_is_lifted, "t4x2"),
	CASE(mismatched_driver_does_not_initialise, "t4x2"),
	CASE(compute_mode_is_honoured, "t4x2"),
	CASE(forked_child_of_an_initialised_process_has_no_cuda, "t4x2"),
	CASE(no_thread_and_no_slot_before_the_first_context, "t4x2"),
	CASE(devices_are_chosen_by_the_environment, "h200x8"),
	CASE(no_visible_device_is_no_device, "t4x2"),
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, COUNT(cases));
}
