/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_values.c - stream memory operations: writes and waits in stream order, on device and host memory, in batches and in graphs. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_driver/tests/harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static CUdeviceptr words(void)
{
	CUdeviceptr address;
	OK(cuMemAlloc_v2(&address, 4096));
	OK(cuMemsetD8_v2(address, 0, 4096));
	return address;
}

static uint32_t read32(CUdeviceptr address)
{
	uint32_t found;
	OK(cuMemcpyDtoH_v2(&found, address, sizeof found));
	return found;
}

static uint64_t read64(CUdeviceptr address)
{
	uint64_t found;
	OK(cuMemcpyDtoH_v2(&found, address, sizeof found));
	return found;
}

static CUstream stream_new(void)
{
	CUstream stream;
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	return stream;
}

/* Not ready now, and not a while later either. */
static void stays_waiting(CUstream stream)
{
	for (int i = 0; i < 5; i++) {
		CHECK_EQUAL(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
		test_sleep_ms(2);
	}
}

/* A word of page-locked host memory, as the host and the device know it. */
static CUdeviceptr host_word(uint64_t **word)
{
	CUdeviceptr address;
	OK(cuMemHostAlloc((void **)word, 4096, 0));
	OK(cuMemHostGetDevicePointer_v2(&address, *word, 0));
	**word = 0;
	return address;
}

static void set_host(uint64_t *word, uint64_t value)
{
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* ---- writes ---------------------------------------------------------------------------------------------------------- */

static void writes_happen_in_stream_order(void)
{
	uint64_t *host;
	test_context(0);
	CUdeviceptr at = words(), seen = host_word(&host);
	CUstream stream = stream_new();
	CUfunction spin = test_spin();
	OK(test_launch(spin, 100000, stream));
	OK(cuStreamWriteValue64_v2(stream, seen, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
	OK(cuStreamWriteValue32_v2(stream, at, 7, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
	OK(cuMemcpyDtoDAsync_v2(at + 64, at, 4, stream));
	OK(cuStreamWriteValue32(stream, at, 8, 0));
	CHECK_EQUAL(__atomic_load_n(host, __ATOMIC_ACQUIRE), 0);        /* the kernel before it runs still */
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(__atomic_load_n(host, __ATOMIC_ACQUIRE), 1);
	CHECK_EQUAL(read32(at + 64), 7);
	CHECK_EQUAL(read32(at), 8);
}

static void writes_have_the_width_of_their_name(void)
{
	test_context(0);
	CUdeviceptr at = words();
	OK(cuMemsetD8_v2(at, 0xff, 16));
	OK(cuStreamWriteValue32_v2(NULL, at, 1, 0));
	OK(cuStreamWriteValue64(NULL, at + 8, UINT64_C(0x123456789abcdef0), 0));
	OK(cuStreamWriteValue32_ptsz(NULL, at + 16, 3, 0));
	OK(cuStreamSynchronize(NULL));
	OK(cuStreamSynchronize_ptsz(NULL));
	CHECK_EQUAL(read64(at), INT64_C(-0x100000000) + 1);
	CHECK_EQUAL(read64(at + 8), 0x123456789abcdef0);
	CHECK_EQUAL(read32(at + 16), 3);
}

/* ---- waits ----------------------------------------------------------------------------------------------------------- */

/* Each condition with a word that does not fit and one that does; of 64 bits, and of 32 where the value is short enough. */
static const struct condition {
	unsigned flags;
	uint64_t value, unfit, fit;
} conditions[] = {
	{ CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 5 },
	{ CU_STREAM_WAIT_VALUE_GEQ, 5, 0, 6 },
	{ CU_STREAM_WAIT_VALUE_GEQ, UINT64_C(0x7fffffff), UINT64_C(0x7ffffffe), UINT64_C(0x7fffffff) },
	{ CU_STREAM_WAIT_VALUE_GEQ, UINT64_MAX, UINT64_MAX - 1, 0 },    /* cyclic: 0 comes after the greatest */
	{ CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5 },
	{ CU_STREAM_WAIT_VALUE_EQ, UINT64_C(1) << 40, 0, UINT64_C(1) << 40 },
	{ CU_STREAM_WAIT_VALUE_AND, 6, 9, 2 },
	{ CU_STREAM_WAIT_VALUE_AND, UINT64_C(1) << 63, UINT64_MAX >> 1, UINT64_C(1) << 63 },
	{ CU_STREAM_WAIT_VALUE_NOR, UINT64_MAX - 6, 6, 2 },
	{ CU_STREAM_WAIT_VALUE_NOR, 0, UINT64_MAX, UINT64_MAX - 1 },
	{ CU_STREAM_WAIT_VALUE_EQ | CU_STREAM_WAIT_VALUE_FLUSH, 5, 6, 5 },
};

static bool fits_32(const struct condition *c)
{
	uint32_t value = (uint32_t)c->value, unfit = (uint32_t)c->unfit, fit = (uint32_t)c->fit;
	return value != unfit && fit != unfit && (c->value >> 32 == 0 || c->value >> 32 == UINT32_MAX);
}

static void each_condition_holds_the_stream_until_the_word_fits(void)
{
	uint64_t *host;
	test_context(0);
	CUdeviceptr at = host_word(&host), done = words();
	CUstream stream = stream_new();
	for (size_t i = 0; i < COUNT(conditions) * 2; i++) {
		const struct condition *c = &conditions[i / 2];
		if (i % 2 && !fits_32(c))
			continue;
		set_host(host, c->unfit);
		OK(i % 2 ? cuStreamWaitValue32_v2(stream, at, (cuuint32_t)c->value, c->flags)
			 : cuStreamWaitValue64_v2(stream, at, c->value, c->flags));
		OK(cuStreamWriteValue32_v2(stream, done, (cuuint32_t)i + 1, 0));
		stays_waiting(stream);
		set_host(host, c->fit);
		OK(cuStreamSynchronize(stream));
		CHECK_EQUAL(read32(done), i + 1);
	}
}

static void write_of_one_stream_lets_another_go_on(void)
{
	test_context(0);
	CUdeviceptr at = words();
	CUstream first = stream_new(), second = stream_new();
	CUevent end;
	OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
	OK(cuStreamWaitValue32(second, at, 1, CU_STREAM_WAIT_VALUE_EQ));
	OK(test_launch(test_spin(), 1000, second));
	OK(cuEventRecord(end, second));
	CHECK_EQUAL(cuEventQuery(end), CUDA_ERROR_NOT_READY);
	OK(test_launch(test_spin(), 30000, first));     /* a waiting stream keeps no kernel of another back */
	OK(cuStreamSynchronize(first));
	CHECK_EQUAL(cuEventQuery(end), CUDA_ERROR_NOT_READY);
	OK(cuStreamWriteValue32_v2(first, at, 1, 0));
	OK(cuEventSynchronize(end));
}

static void write_of_one_device_lets_a_stream_of_another_go_on(void)
{
	uint64_t *host;
	CUcontext one = test_context(0), two;
	CUdeviceptr at = words(), flag = host_word(&host);
	CUstream waiting = stream_new();
	OK(cuStreamWaitValue64(waiting, flag, 9, CU_STREAM_WAIT_VALUE_EQ));
	OK(cuStreamWriteValue32_v2(waiting, at, 1, 0));
	stays_waiting(waiting);
	OK(cuCtxCreate_v2(&two, 0, 1));
	CUstream writing = stream_new();
	OK(test_launch(test_spin(), 20000, writing));
	OK(cuStreamWriteValue64_v2(writing, flag, 9, 0));
	OK(cuCtxSetCurrent(one));
	OK(cuStreamSynchronize(waiting));
	CHECK_EQUAL(read32(at), 1);
}

static void time_spent_waiting_is_no_work_of_the_gpu(void)
{
	float ms;
	uint64_t *host;
	test_context(0);
	CUdeviceptr at = host_word(&host);
	CUstream stream = stream_new();
	CUevent begin, end;
	OK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
	OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
	OK(cuEventRecord(begin, stream));
	OK(cuStreamWaitValue32_v2(stream, at, 1, CU_STREAM_WAIT_VALUE_GEQ));
	OK(test_launch(test_spin(), 5000, stream));
	OK(cuEventRecord(end, stream));
	test_sleep_ms(100);
	set_host(host, 1);
	OK(cuEventSynchronize(end));
	OK(cuEventElapsedTime(&ms, begin, end));
	CHECK_BETWEEN(ms, 105, 105 + 2000);     /* the kernel begins after the word was written, not before */
	uint64_t busy_ns = 0;
	const struct sim_state *state = test_state();
	for (int slot = 0; slot < SIM_MAX_SLOTS; slot++)
		busy_ns += atomic_load(&state->slots[slot].gpus[0].busy_total_ns);
	CHECK_BETWEEN((double)busy_ns / 1e6, 4.9, 5.1);
}

/* ---- what is refused ------------------------------------------------------------------------------------------------- */

static void bad_words_and_flags_are_refused(void)
{
	test_context(0);
	CUdeviceptr at = words(), managed;
	OK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
	uint64_t plain = 0;
	const CUdeviceptr bad[] = { 0, at + 2, at + 4096, managed, (CUdeviceptr)(uintptr_t)&plain };
	for (size_t i = 0; i < COUNT(bad); i++) {
		CHECK_EQUAL(cuStreamWriteValue32_v2(NULL, bad[i], 1, 0), CUDA_ERROR_INVALID_VALUE);
		CHECK_EQUAL(cuStreamWaitValue32_v2(NULL, bad[i], 1, 0), CUDA_ERROR_INVALID_VALUE);
	}
	CHECK_EQUAL(cuStreamWriteValue64_v2(NULL, at + 4, 1, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuStreamWriteValue32_v2(NULL, at, 1, 2), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuStreamWaitValue32_v2(NULL, at, 1, 4), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuStreamWaitValue64_v2((CUstream)(void *)&plain, at, 1, 0), CUDA_ERROR_INVALID_HANDLE);
	OK(cuCtxSynchronize());
}

static void attributes_say_what_the_driver_can_do(void)
{
	static const CUdevice_attribute able[] = { CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
						   CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
						   CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
						   CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES };
	int value;
	OK(cuInit(0));
	for (size_t i = 0; i < COUNT(able); i++) {
		OK(cuDeviceGetAttribute(&value, able[i], 0));
		CHECK_EQUAL(value, 1);
	}
}

/* ---- batches and graphs ---------------------------------------------------------------------------------------------- */

static CUstreamBatchMemOpParams write_op(CUdeviceptr at, uint32_t value)
{
	return (CUstreamBatchMemOpParams){
		.writeValue = { .operation = CU_STREAM_MEM_OP_WRITE_VALUE_32, .address = at, .value = value },
	};
}

static CUstreamBatchMemOpParams wait_op(CUdeviceptr at, uint64_t value)
{
	return (CUstreamBatchMemOpParams){
		.waitValue = { .operation = CU_STREAM_MEM_OP_WAIT_VALUE_64,
			       .address = at,
			       .value64 = value,
			       .flags = CU_STREAM_WAIT_VALUE_EQ },
	};
}

static void batch_is_done_in_order_or_not_at_all(void)
{
	uint64_t *host;
	test_context(0);
	CUdeviceptr at = words(), gate = host_word(&host);
	CUstream stream = stream_new();
	CUstreamBatchMemOpParams flush = { .flushRemoteWrites = { CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES, 0 } };
	CUstreamBatchMemOpParams barrier = { .memoryBarrier = { CU_STREAM_MEM_OP_BARRIER, CU_STREAM_MEMORY_BARRIER_TYPE_GPU } };
	CUstreamBatchMemOpParams batch[] = { write_op(at, 1), flush, wait_op(gate, 3), write_op(at, 2), barrier, write_op(at + 4, 3) };
	OK(cuStreamBatchMemOp_v2(stream, COUNT(batch), batch, 0));
	stays_waiting(stream);
	CHECK_EQUAL(read32(at), 1);
	set_host(host, 3);
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(read32(at), 2);
	CHECK_EQUAL(read32(at + 4), 3);

	CHECK_EQUAL(cuStreamBatchMemOp(stream, COUNT(batch), batch, 0), CUDA_ERROR_INVALID_VALUE);      /* barriers came later */
	CUstreamBatchMemOpParams last_is_bad[] = { write_op(at, 9), write_op(at + 1, 9) };
	CHECK_EQUAL(cuStreamBatchMemOp_v2(stream, 2, last_is_bad, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuStreamBatchMemOp_v2(stream, 1, batch, 1), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuStreamBatchMemOp_v2(stream, 256, batch, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(read32(at), 2);
}

static void captured_operations_are_nodes_that_can_be_changed(void)
{
	size_t count = 0;
	CUgraph graph;
	CUgraphExec exec;
	CUgraphNode nodes[2];
	CUgraphNodeType type;
	uint64_t *host;
	test_context(0);
	CUdeviceptr at = words(), gate = host_word(&host);
	CUstream stream = stream_new();
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	OK(cuStreamWaitValue64_v2(stream, gate, 1, CU_STREAM_WAIT_VALUE_EQ));
	OK(cuStreamWriteValue32_v2(stream, at, 5, 0));
	OK(cuStreamEndCapture(stream, &graph));
	CHECK_EQUAL(read32(at), 0);
	OK(cuGraphGetNodes(graph, NULL, &count));
	CHECK_EQUAL(count, 2);
	OK(cuGraphGetNodes(graph, nodes, &count));
	for (size_t i = 0; i < count; i++) {
		OK(cuGraphNodeGetType(nodes[i], &type));
		CHECK_EQUAL(type, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
	}
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphLaunch(exec, stream));
	stays_waiting(stream);
	set_host(host, 1);
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(read32(at), 5);

	CUDA_BATCH_MEM_OP_NODE_PARAMS batch;
	OK(cuGraphBatchMemOpNodeGetParams(nodes[1], &batch));
	CHECK_EQUAL(batch.count, 1);
	CHECK_EQUAL(batch.paramArray[0].writeValue.value, 5);
	CUstreamBatchMemOpParams other[] = { write_op(at, 6), write_op(at + 4, 7) };
	batch.count = 2;
	batch.paramArray = other;
	OK(cuGraphExecBatchMemOpNodeSetParams(exec, nodes[1], &batch));
	OK(cuGraphLaunch(exec, stream));
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(read32(at), 6);
	CHECK_EQUAL(read32(at + 4), 7);
	OK(cuGraphBatchMemOpNodeGetParams(nodes[1], &batch));
	CHECK_EQUAL(batch.count, 1);    /* the graph itself did not change */
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
}

static void batch_nodes_are_added_by_both_calls(void)
{
	CUgraph graph;
	CUgraphExec exec;
	CUgraphNode first, second;
	test_context(0);
	CUdeviceptr at = words();
	CUstreamBatchMemOpParams one = write_op(at, 1), two = write_op(at, 2), bad = write_op(at + 2, 2);
	CUDA_BATCH_MEM_OP_NODE_PARAMS batch = { .count = 1, .paramArray = &one };
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddBatchMemOpNode(&first, graph, NULL, 0, &batch));
	CUgraphNodeParams any = { .type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .memOp = { .count = 1, .paramArray = &two } };
	OK(cuGraphAddNode(&second, graph, &first, 1, &any));
	batch.paramArray = &bad;
	CHECK_EQUAL(cuGraphAddBatchMemOpNode(&second, graph, NULL, 0, &batch), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuGraphBatchMemOpNodeSetParams(first, &batch), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuCtxSynchronize());
	CHECK_EQUAL(read32(at), 2);
}

static void older_forms_end_a_capture(void)
{
	CUgraph graph;
	test_context(0);
	CUdeviceptr at = words();
	CUstream stream = stream_new();
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	CHECK_EQUAL(cuStreamWriteValue32(stream, at, 5, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

static void freeing_waits_for_operations_on_memory(void)
{
	test_context(0);
	CUdeviceptr at = words();
	CUstream stream = stream_new();
	OK(test_launch(test_spin(), 50000, stream));
	OK(cuStreamWriteValue32_v2(stream, at, 1, 0));
	OK(cuMemFree_v2(at));
	CHECK_EQUAL(cuStreamQuery(stream), CUDA_SUCCESS);
}

static const struct test_case cases[] = {
	CASE(writes_happen_in_stream_order, "t4x2"),
	CASE(writes_have_the_width_of_their_name, "t4x2"),
	CASE(each_condition_holds_the_stream_until_the_word_fits, "t4x2"),
	CASE(write_of_one_stream_lets_another_go_on, "t4x2"),
	CASE(write_of_one_device_lets_a_stream_of_another_go_on, "t4x2"),
	CASE(time_spent_waiting_is_no_work_of_the_gpu, "t4x2"),
	CASE(bad_words_and_flags_are_refused, "t4x2"),
	CASE(attributes_say_what_the_driver_can_do, "t4x2"),
	CASE(batch_is_done_in_order_or_not_at_all, "t4x2"),
	CASE(captured_operations_are_nodes_that_can_be_changed, "t4x2"),
	CASE(batch_nodes_are_added_by_both_calls, "t4x2"),
	CASE(older_forms_end_a_capture, "t4x2"),
	CASE(freeing_waits_for_operations_on_memory, "t4x2"),
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, COUNT(cases));
}
