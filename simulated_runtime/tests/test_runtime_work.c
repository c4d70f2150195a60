/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, events, captures, graphs, user objects. */
#include "simulated_runtime/tests/client.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

static _Atomic uint32_t calls;

static void count_call(void *data)
{
	atomic_fetch_add(data ? (_Atomic uint32_t *)data : &calls, 1);
}

static void count_callback(cudaStream_t stream, cudaError_t status, void *data)
{
	(void)stream;
	CHECK_EQUAL(status, cudaSuccess);
	count_call(data);
}

static void spin(uint64_t microseconds, cudaStream_t stream)
{
	OK(cudaLaunchKernel(spin_stub, ONE, ONE, (void *[]){ &microseconds }, 0, stream));
}

static void test_streams_in_each_form(void)
{
	cudaStream_t streams[3];
	int priority = 9;
	OK(cudaStreamCreate(&streams[0]));
	OK(cudaStreamCreateWithFlags(&streams[1], CU_STREAM_NON_BLOCKING));
	OK(cudaStreamCreateWithPriority(&streams[2], CU_STREAM_NON_BLOCKING, -1));
	OK(cudaStreamGetPriority(streams[2], &priority));
	CHECK_EQUAL(priority, -1);
	OK(cudaStreamGetPriority_ptsz(NULL, &priority));
	CHECK_EQUAL(priority, 0);
	for (int i = 0; i < 3; i++) {
		OK(cudaStreamQuery(streams[i]));
		OK(cudaStreamSynchronize(streams[i]));
		OK(cudaStreamDestroy(streams[i]));
	}
	FAILS(cudaStreamCreateWithFlags(&streams[0], 99), cudaErrorInvalidValue);
}

static void test_not_ready_is_no_last_error(void)
{
	cudaEvent_t event;
	client_register();
	OK(cudaEventCreateWithFlags(&event, CU_EVENT_DISABLE_TIMING));
	spin(50000, NULL);
	OK(cudaEventRecordWithFlags(event, NULL, 0));
	CHECK_EQUAL(cudaEventQuery(event), cudaErrorNotReady);
	CHECK_EQUAL(cudaStreamQuery(NULL), cudaErrorNotReady);
	CHECK_EQUAL(cudaPeekAtLastError(), cudaSuccess);
	OK(cudaEventSynchronize(event));
	OK(cudaEventQuery(event));
	OK(cudaEventDestroy(event));
}

static void test_events_order_streams_and_measure(void)
{
	cudaStream_t first, second;
	cudaEvent_t start, end, unrecorded;
	float milliseconds;
	client_register();
	OK(cudaStreamCreateWithFlags(&first, CU_STREAM_NON_BLOCKING));
	OK(cudaStreamCreateWithFlags(&second, CU_STREAM_NON_BLOCKING));
	OK(cudaEventCreate(&start));
	OK(cudaEventCreate(&end));
	double began = test_seconds();
	OK(cudaEventRecord(start, first));
	spin(3000, first);
	OK(cudaEventRecord(end, first));
	OK(cudaStreamWaitEvent(second, end, 0));
	OK(cudaStreamSynchronize(second));
	double passed_ms = (test_seconds() - began) * 1000;     /* on a busy machine the launch comes long after the record */
	OK(cudaEventElapsedTime(&milliseconds, start, end));
	CHECK_BETWEEN(milliseconds, 2.9, passed_ms + 0.5);
#if RUNTIME_MAJOR == 12
	OK(cudaEventElapsedTime_v2(&milliseconds, start, end));
#endif
	OK(cudaEventCreate(&unrecorded));
	FAILS(cudaEventElapsedTime(&milliseconds, start, unrecorded), cudaErrorInvalidResourceHandle);
	OK(cudaEventDestroy(unrecorded));
	OK(cudaEventRecord_ptsz(end, NULL));
	OK(cudaStreamSynchronize(CU_STREAM_PER_THREAD));
	OK(cudaEventQuery(end));
}

static void test_host_functions_and_callbacks_run(void)
{
	OK(cudaLaunchHostFunc(NULL, count_call, &calls));
	OK(cudaStreamAddCallback(NULL, count_callback, &calls, 0));
	OK(cudaLaunchHostFunc_ptsz(NULL, count_call, &calls));
	OK(cudaStreamSynchronize_ptsz(NULL));
	OK(cudaDeviceSynchronize());
	test_await(&calls, 3);
	FAILS(cudaLaunchHostFunc(NULL, NULL, NULL), cudaErrorInvalidValue);
}

/* The twin of a call uses the thread's own stream, the call itself the legacy stream. */
static void test_twins_use_the_stream_of_the_thread(void)
{
	uint64_t microseconds = 30000;
	CUkernel kernel;
	cudaLaunchConfig_t config = { .gridDim = ONE, .blockDim = ONE };
	client_register();
	OK(__cudaGetKernel(&kernel, spin_stub));
	OK(__cudaLaunchKernel_ptsz(kernel, ONE, ONE, (void *[]){ &microseconds }, 0, NULL));
	CHECK_EQUAL(cudaStreamQuery_ptsz(NULL), cudaErrorNotReady);
	CHECK_EQUAL(cudaStreamQuery(CU_STREAM_PER_THREAD), cudaErrorNotReady);
	OK(cudaStreamSynchronize_ptsz(NULL));
	OK(cudaLaunchKernel_ptsz(spin_stub, ONE, ONE, (void *[]){ &microseconds }, 0, NULL));
	CHECK_EQUAL(cudaStreamQuery(CU_STREAM_PER_THREAD), cudaErrorNotReady);
	OK(cudaStreamSynchronize_ptsz(NULL));
	OK(cudaLaunchKernelExC_ptsz(&config, spin_stub, (void *[]){ &microseconds }));
	CHECK_EQUAL(cudaStreamQuery(CU_STREAM_PER_THREAD), cudaErrorNotReady);
	OK(cudaStreamSynchronize_ptsz(NULL));
}

/* ---- captures -------------------------------------------------------------------------------------------------------- */

static void check_capturing(cudaStream_t stream, CUstreamCaptureStatus wanted)
{
	CUstreamCaptureStatus status = 9;
	unsigned long long id = 0;
	cudaGraph_t graph = NULL;
	const cudaGraphNode_t *nodes = NULL;
	size_t count = 0;
	OK(cudaStreamIsCapturing(stream, &status));
	CHECK_EQUAL(status, wanted);
#if RUNTIME_MAJOR == 12
	OK(cudaStreamGetCaptureInfo_v2(stream, &status, &id, &graph, &nodes, &count));
	CHECK_EQUAL(status, wanted);
	const CUgraphEdgeData *edges = NULL;
	OK(cudaStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &nodes, &edges, &count));
#else
	const CUgraphEdgeData *edges = NULL;
	OK(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, &edges, &count));
#endif
	CHECK_EQUAL(status, wanted);
	CHECK_EQUAL(graph != NULL, wanted == CU_STREAM_CAPTURE_STATUS_ACTIVE);
}

static cudaError_t update_dependencies(cudaStream_t stream, cudaGraphNode_t *nodes, size_t count)
{
#if RUNTIME_MAJOR == 12
	OK(cudaStreamUpdateCaptureDependencies_v2(stream, nodes, NULL, count, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
	return cudaStreamUpdateCaptureDependencies(stream, nodes, count, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
#else
	return cudaStreamUpdateCaptureDependencies(stream, nodes, NULL, count, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
#endif
}

static void test_captured_work_runs_at_each_launch(void)
{
	cudaStream_t stream;
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	client_register();
	OK(cudaStreamCreate(&stream));
	check_capturing(stream, CU_STREAM_CAPTURE_STATUS_NONE);
	OK(cudaStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	check_capturing(stream, CU_STREAM_CAPTURE_STATUS_ACTIVE);
	spin(10, stream);
	OK(cudaLaunchHostFunc(stream, count_call, &calls));
	OK(update_dependencies(stream, NULL, 0));
	OK(cudaStreamEndCapture(stream, &graph));
	OK(cudaGraphInstantiate(&executable, graph, 0));
	CHECK_EQUAL(calls, 0);
	OK(cudaGraphLaunch(executable, stream));
	OK(cudaGraphLaunch(executable, stream));
	OK(cudaStreamSynchronize(stream));
	CHECK_EQUAL(calls, 2);
	OK(cudaGraphExecDestroy(executable));
	OK(cudaGraphDestroy(graph));
	FAILS(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
}

static void test_capture_refuses_what_it_cannot_hold(void)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	cudaStream_t stream;
	cudaGraph_t graph;
	OK(cudaStreamCreate(&stream));
	OK(cudaThreadExchangeStreamCaptureMode(&mode));
	CHECK_EQUAL(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
	OK(cudaThreadExchangeStreamCaptureMode(&mode));
	OK(cudaStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	FAILS(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
	FAILS(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}

static void test_capture_into_a_graph(void)
{
	cudaStream_t stream;
	cudaGraph_t graph, same;
	size_t count = 0;
	client_register();
	OK(cuInit(0));
	OK(cudaStreamCreate(&stream));
	OK(cuGraphCreate(&graph, 0));
	OK(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL));
	spin(10, stream);
	OK(cudaStreamEndCapture(stream, &same));
	CHECK(same == graph);
	OK(cudaGraphGetNodes(graph, NULL, &count));
	CHECK_EQUAL(count, 1);
}

/* ---- graphs ---------------------------------------------------------------------------------------------------------- */

static cudaError_t add(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after, struct cudaGraphNodeParams *params)
{
#if RUNTIME_MAJOR == 12
	cudaGraphNode_t twice;
	OK(cudaGraphAddNode(&twice, graph, after, after ? 1 : 0, params));
	return cudaGraphAddNode_v2(node, graph, after, NULL, after ? 1 : 0, params);
#else
	return cudaGraphAddNode(node, graph, after, NULL, after ? 1 : 0, params);
#endif
}

static size_t dependencies_of(cudaGraphNode_t node)
{
	size_t count = 0;
#if RUNTIME_MAJOR == 12
	size_t same = 0;
	OK(cudaGraphNodeGetDependencies_v2(node, NULL, NULL, &same));
	OK(cudaGraphNodeGetDependencies(node, NULL, &count));
	CHECK_EQUAL(count, same);
#else
	OK(cudaGraphNodeGetDependencies(node, NULL, NULL, &count));
#endif
	return count;
}

/* One node of each kind that has a form of its own in the runtime, one after the other. */
static void test_nodes_of_each_kind_run(void)
{
	static char from[64] = "graph", to[64];
	uint64_t microseconds = 1;
	void *arguments[] = { &microseconds }, *device;
	cudaGraph_t graph;
	cudaGraphNode_t kernel, upload, download, host, empty;
	cudaGraphExec_t executable;
	CUgraphNodeType type = 99;
	client_register();
	OK(cudaMalloc(&device, sizeof(from)));
	OK(cuGraphCreate(&graph, 0));
	struct cudaGraphNodeParams params = { .type = CU_GRAPH_NODE_TYPE_KERNEL };
	params.kernel = (struct cudaKernelNodeParamsV2){ .func = spin_stub, .gridDim = ONE, .blockDim = ONE, .kernelParams = arguments };
	OK(add(&kernel, graph, NULL, &params));
	params = (struct cudaGraphNodeParams){ .type = CU_GRAPH_NODE_TYPE_MEMCPY };
	params.memcpy.copyParams = (struct cudaMemcpy3DParms){
		.srcPtr = { from, 64, 64, 1 },
		.dstPtr = { device, 64, 64, 1 },
		.extent = { 64, 1, 1 },
		.kind = cudaMemcpyHostToDevice,
	};
	OK(add(&upload, graph, &kernel, &params));
	params.memcpy.copyParams = (struct cudaMemcpy3DParms){
		.srcPtr = { device, 64, 64, 1 },
		.dstPtr = { to, 64, 64, 1 },
		.extent = { 64, 1, 1 },
		.kind = cudaMemcpyDefault,
	};
	OK(add(&download, graph, &upload, &params));
	CUgraphNodeParams on_host = { .type = CU_GRAPH_NODE_TYPE_HOST, .host = { count_call, &calls } };
	OK(add(&host, graph, &download, (struct cudaGraphNodeParams *)(void *)&on_host));
	OK(cudaGraphAddEmptyNode(&empty, graph, &host, 1));
	OK(cudaGraphNodeGetType(download, &type));
	CHECK_EQUAL(type, CU_GRAPH_NODE_TYPE_MEMCPY);
	CHECK_EQUAL(dependencies_of(empty), 1);
	OK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
	OK(cudaGraphLaunch_ptsz(executable, NULL));
	OK(cudaStreamSynchronize(CU_STREAM_PER_THREAD));
	CHECK_EQUAL(strcmp(to, from), 0);
	CHECK(calls >= 1);
	OK(cudaGraphExecDestroy(executable));
	OK(cudaGraphDestroy(graph));
}

#if RUNTIME_MAJOR == 12
#define add_bad(node, graph, params) cudaGraphAddNode_v2(node, graph, NULL, NULL, 0, params)
#else
#define add_bad(node, graph, params) cudaGraphAddNode(node, graph, NULL, NULL, 0, params)
#endif

static void test_bad_nodes_are_refused(void)
{
	cudaGraph_t graph;
	cudaGraphNode_t node;
	struct cudaGraphNodeParams params = { .type = CU_GRAPH_NODE_TYPE_KERNEL };
	client_register();
	OK(cudaFree(NULL));
	OK(cuGraphCreate(&graph, 0));
	params.kernel = (struct cudaKernelNodeParamsV2){ .func = unregistered_stub, .gridDim = ONE, .blockDim = ONE };
	FAILS(add_bad(&node, graph, &params), cudaErrorInvalidDeviceFunction);
	params = (struct cudaGraphNodeParams){ .type = CU_GRAPH_NODE_TYPE_MEMCPY };
	params.memcpy.copyParams.kind = 9;
	FAILS(add_bad(&node, graph, &params), cudaErrorInvalidMemcpyDirection);
	FAILS(add_bad(&node, graph, NULL), cudaErrorInvalidValue);
}

static void test_allocation_nodes_return_their_address(void)
{
	cudaGraph_t graph;
	cudaGraphNode_t node;
	CUgraphNodeParams params = { .type = CU_GRAPH_NODE_TYPE_MEM_ALLOC };
	params.alloc.poolProps = (CUmemPoolProps){ .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
						   .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	params.alloc.bytesize = MIB;
	OK(cudaFree(NULL));
	OK(cuGraphCreate(&graph, 0));
	OK(add_bad(&node, graph, (struct cudaGraphNodeParams *)(void *)&params));
	CHECK(params.alloc.dptr != 0);
}

/* The simulated driver has no conditional nodes; the call reaches it and the process goes on. */
static void test_conditional_handles_are_not_supported(void)
{
	CUgraphConditionalHandle handle = 0;
	cudaGraph_t graph;
	OK(cudaFree(NULL));
	OK(cuGraphCreate(&graph, 0));
	FAILS(cudaGraphConditionalHandleCreate(&handle, graph, 1, 1), cudaErrorNotSupported);
	OK(cudaGraphDestroy(graph));
}

static void test_user_object_lives_as_long_as_its_graph(void)
{
	cudaUserObject_t object;
	cudaGraph_t graph;
	OK(cudaFree(NULL));
	OK(cuGraphCreate(&graph, 0));
	OK(cudaUserObjectCreate(&object, &calls, count_call, 1, 1));
	OK(cudaGraphRetainUserObject(graph, object, 1, 0));
	OK(cudaUserObjectRelease(object, 1));
	CHECK_EQUAL(calls, 0);
	OK(cudaGraphDestroy(graph));
	test_await(&calls, 1);
	FAILS(cudaUserObjectCreate(NULL, &calls, count_call, 1, 1), cudaErrorInvalidValue);
}

static void test_a_graph_is_printed(void)
{
	char path[4096], text[16] = "";
	int file = test_file(path, sizeof path);
	cudaGraph_t graph;
	CHECK(file >= 0);
	OK(cudaFree(NULL));
	OK(cuGraphCreate(&graph, 0));
	OK(cudaGraphDebugDotPrint(graph, path, 0));
	CHECK(read(file, text, sizeof(text) - 1) > 0);
	CHECK_EQUAL(strncmp(text, "digraph", 7), 0);
	close(file);
	unlink(path);
}

static const struct test_case cases[] = {
	CASE(test_streams_in_each_form, "h200x8"),
	CASE(test_not_ready_is_no_last_error, "h200x8"),
	CASE(test_events_order_streams_and_measure, "h200x8"),
	CASE(test_host_functions_and_callbacks_run, "h200x8"),
	CASE(test_twins_use_the_stream_of_the_thread, "h200x8"),
	CASE(test_captured_work_runs_at_each_launch, "h200x8"),
	CASE(test_capture_refuses_what_it_cannot_hold, "h200x8"),
	CASE(test_capture_into_a_graph, "h200x8"),
	CASE(test_nodes_of_each_kind_run, "h200x8"),
	CASE(test_bad_nodes_are_refused, "h200x8"),
	CASE(test_allocation_nodes_return_their_address, "h200x8"),
	CASE(test_conditional_handles_are_not_supported, "h200x8"),
	CASE(test_user_object_lives_as_long_as_its_graph, "h200x8"),
	CASE(test_a_graph_is_printed, "h200x8"),
};

int main(int argc, char **argv)
{
	return client_main(argc, argv, cases, sizeof(cases) / sizeof(*cases));
}
