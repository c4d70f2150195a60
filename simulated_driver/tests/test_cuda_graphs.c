/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_graphs.c - what belongs to graphs beside their work: user objects, single nodes, and what the driver refuses to build. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_driver/tests/harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- user objects ---------------------------------------------------------------------------------------------------- */

struct kept {
	_Atomic uint32_t destroyed;
	pthread_t by;
};

static void destroy(void *data)
{
	struct kept *kept = data;
	kept->by = pthread_self();
	atomic_fetch_add(&kept->destroyed, 1);
}

static CUuserObject object_of(struct kept *kept, unsigned references)
{
	CUuserObject object;
	OK(cuUserObjectCreate(&object, kept, destroy, references, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
	return object;
}

/* Not destroyed now, and not a while later either. */
static void still_there(const struct kept *kept)
{
	test_sleep_ms(10);
	CHECK_EQUAL(atomic_load(&kept->destroyed), 0);
}

static void gone(const struct kept *kept)
{
	test_await(&kept->destroyed, 1);
	test_sleep_ms(5);
	CHECK_EQUAL(atomic_load(&kept->destroyed), 1);
	CHECK(!pthread_equal(kept->by, pthread_self()));
}

static CUgraph graph_with_kernel(uint64_t microseconds)
{
	CUgraph graph;
	CUgraphNode node;
	void *parameters[] = { &microseconds };
	CUDA_KERNEL_NODE_PARAMS kernel = { .func = test_spin(),
					   .gridDimX = 1,
					   .gridDimY = 1,
					   .gridDimZ = 1,
					   .blockDimX = 1,
					   .blockDimY = 1,
					   .blockDimZ = 1,
					   .kernelParams = parameters };
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &kernel));
	return graph;
}

static void last_reference_of_the_application_destroys(void)
{
	struct kept kept = { 0 };
	test_context(0);
	CUuserObject object = object_of(&kept, 2);
	OK(cuUserObjectRetain(object, 3));
	OK(cuUserObjectRelease(object, 4));
	still_there(&kept);
	OK(cuUserObjectRelease(object, 1));
	gone(&kept);
	CHECK_EQUAL(cuUserObjectRetain(object, 1), CUDA_ERROR_INVALID_VALUE);
}

static void graph_keeps_an_object_and_gives_it_back(void)
{
	struct kept kept = { 0 };
	CUgraph graph;
	test_context(0);
	CUuserObject object = object_of(&kept, 1);
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphRetainUserObject(graph, object, 2, 0));
	OK(cuUserObjectRelease(object, 1));
	still_there(&kept);
	CHECK_EQUAL(cuGraphReleaseUserObject(graph, object, 3), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphReleaseUserObject(graph, object, 1));
	still_there(&kept);
	OK(cuGraphDestroy(graph));
	gone(&kept);
}

static void object_moves_to_a_graph(void)
{
	struct kept kept = { 0 };
	CUgraph graph;
	test_context(0);
	CUuserObject object = object_of(&kept, 1);
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
	still_there(&kept);
	OK(cuGraphReleaseUserObject(graph, object, 1));
	gone(&kept);
	OK(cuGraphDestroy(graph));
}

static void clones_children_and_executable_graphs_keep_an_object(void)
{
	struct kept kept = { 0 };
	CUgraph graph, clone, parent;
	CUgraphNode child;
	CUgraphExec exec;
	test_context(0);
	graph = graph_with_kernel(100);
	OK(cuGraphRetainUserObject(graph, object_of(&kept, 1), 1, CU_GRAPH_USER_OBJECT_MOVE));
	OK(cuGraphClone(&clone, graph));
	OK(cuGraphCreate(&parent, 0));
	OK(cuGraphAddChildGraphNode(&child, parent, NULL, 0, graph));
	OK(cuGraphInstantiateWithFlags(&exec, parent, 0));
	OK(cuGraphDestroy(graph));
	still_there(&kept);
	OK(cuGraphDestroy(clone));
	OK(cuGraphDestroy(parent));
	still_there(&kept);
	OK(cuGraphLaunch(exec, NULL));
	OK(cuStreamSynchronize(NULL));
	still_there(&kept);
	OK(cuGraphExecDestroy(exec));
	gone(&kept);
}

static void launch_under_way_keeps_an_object(void)
{
	struct kept kept = { 0 };
	CUgraphExec exec;
	test_context(0);
	CUgraph graph = graph_with_kernel(200000);
	OK(cuGraphRetainUserObject(graph, object_of(&kept, 1), 1, CU_GRAPH_USER_OBJECT_MOVE));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
	still_there(&kept);
	OK(cuStreamSynchronize(NULL));
	gone(&kept);
}

static void update_replaces_the_objects_of_an_executable_graph(void)
{
	struct kept old = { 0 }, new = { 0 };
	CUgraphExec exec;
	CUgraphExecUpdateResultInfo info;
	test_context(0);
	CUgraph first = graph_with_kernel(100), second = graph_with_kernel(200);
	OK(cuGraphRetainUserObject(first, object_of(&old, 1), 1, CU_GRAPH_USER_OBJECT_MOVE));
	OK(cuGraphRetainUserObject(second, object_of(&new, 1), 1, CU_GRAPH_USER_OBJECT_MOVE));
	OK(cuGraphInstantiateWithFlags(&exec, first, 0));
	OK(cuGraphDestroy(first));
	still_there(&old);
	OK(cuGraphExecUpdate_v2(exec, second, &info));
	gone(&old);
	OK(cuGraphDestroy(second));
	still_there(&new);
	OK(cuGraphExecDestroy(exec));
	gone(&new);
}

static void destructor_may_take_its_time(void *data)
{
	test_sleep_ms(100);
	destroy(data);
}

static void slow_destructor_holds_no_call_up(void)
{
	struct kept slow = { 0 }, next = { 0 };
	CUuserObject object;
	test_context(0);
	OK(cuUserObjectCreate(&object, &slow, destructor_may_take_its_time, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
	double start = test_seconds();
	OK(cuUserObjectRelease(object, 1));
	OK(cuUserObjectRelease(object_of(&next, 1), 1));
	OK(test_launch(test_spin(), 10, NULL));
	OK(cuCtxSynchronize());
	CHECK(test_seconds() - start < 0.09 * test_slack);
	gone(&slow);
	gone(&next);
}

static void wrong_references_are_refused(void)
{
	struct kept kept = { 0 };
	CUuserObject object;
	CUgraph graph;
	test_context(0);
	OK(cuGraphCreate(&graph, 0));
	CHECK_EQUAL(cuUserObjectCreate(&object, &kept, destroy, 1, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuUserObjectCreate(&object, &kept, destroy, 0, 1), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuUserObjectCreate(&object, &kept, NULL, 1, 1), CUDA_ERROR_INVALID_VALUE);
	object = object_of(&kept, 1);
	CHECK_EQUAL(cuUserObjectRetain(object, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuUserObjectRelease(object, 2), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuGraphRetainUserObject(graph, object, 1, 2), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuGraphRetainUserObject(graph, (CUuserObject)(void *)graph, 1, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuGraphReleaseUserObject(graph, object, 1), CUDA_ERROR_INVALID_VALUE);
	still_there(&kept);
	OK(cuUserObjectRelease(object, 1));
	gone(&kept);
}

/* ---- single nodes ---------------------------------------------------------------------------------------------------- */

static CUevent event_new(void)
{
	CUevent event;
	OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
	return event;
}

static void event_nodes_take_another_event(void)
{
	CUgraph graph;
	CUgraphNode record, wait;
	CUgraphExec exec;
	CUevent found;
	test_context(0);
	CUevent one = event_new(), two = event_new(), three = event_new();
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddEventRecordNode(&record, graph, NULL, 0, one));
	OK(cuGraphAddEventWaitNode(&wait, graph, &record, 1, one));
	OK(cuGraphEventRecordNodeSetEvent(record, two));
	OK(cuGraphEventWaitNodeSetEvent(wait, two));
	OK(cuGraphEventRecordNodeGetEvent(record, &found));
	CHECK(found == two);
	OK(cuGraphEventWaitNodeGetEvent(wait, &found));
	CHECK(found == two);
	CHECK_EQUAL(cuGraphEventWaitNodeGetEvent(record, &found), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphExecEventRecordNodeSetEvent(exec, record, three));
	OK(cuGraphExecEventWaitNodeSetEvent(exec, wait, three));
	OK(cuEventDestroy_v2(one));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuEventSynchronize(three));
	OK(cuStreamSynchronize(NULL));
	OK(cuGraphEventRecordNodeGetEvent(record, &found));
	CHECK(found == two);    /* the graph itself did not change */
	CHECK_EQUAL(cuGraphEventRecordNodeSetEvent(record, one), CUDA_ERROR_INVALID_HANDLE);
}

static void kernel_nodes_have_attributes(void)
{
	size_t count = 1;
	CUgraphNode from, to;
	CUkernelNodeAttrValue value = { .priority = -3 };
	test_context(0);
	CUgraph graph = graph_with_kernel(100), other = graph_with_kernel(100);
	OK(cuGraphGetNodes(graph, &from, &count));
	OK(cuGraphGetNodes(other, &to, &count));
	OK(cuGraphKernelNodeSetAttribute(from, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value));
	value.cooperative = 1;
	OK(cuGraphKernelNodeSetAttribute(from, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value));
	OK(cuGraphKernelNodeCopyAttributes(to, from));
	OK(cuGraphKernelNodeGetAttribute(to, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value));
	CHECK_EQUAL(value.priority, -3);
	OK(cuGraphKernelNodeGetAttribute(to, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value));
	CHECK_EQUAL(value.cooperative, 1);
	CHECK_EQUAL(cuGraphKernelNodeGetAttribute(to, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value), CUDA_ERROR_INVALID_VALUE);
}

static void child_of_an_executable_graph_is_replaced_by_one_of_its_shape(void)
{
	CUgraph parent, empty;
	CUgraphNode child;
	CUgraphExec exec;
	float ms;
	test_context(0);
	CUevent begin = event_new(), end = event_new();
	CUgraph quick = graph_with_kernel(100), slow = graph_with_kernel(50000);
	OK(cuGraphCreate(&parent, 0));
	OK(cuGraphCreate(&empty, 0));
	OK(cuGraphAddChildGraphNode(&child, parent, NULL, 0, quick));
	OK(cuGraphInstantiateWithFlags(&exec, parent, 0));
	OK(cuGraphExecChildGraphNodeSetParams(exec, child, slow));
	CHECK_EQUAL(cuGraphExecChildGraphNodeSetParams(exec, child, empty), CUDA_ERROR_INVALID_VALUE);
	OK(cuEventRecord(begin, NULL));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuEventRecord(end, NULL));
	OK(cuEventSynchronize(end));
	OK(cuEventElapsedTime(&ms, begin, end));
	CHECK_BETWEEN(ms, 49.9, 2000);
}

static void graphs_and_nodes_have_numbers(void)
{
	CUgraph found;
	CUgraphExec exec;
	CUgraphNode nodes[2];
	unsigned graph_id, exec_id, other_id, local;
	unsigned long long tools[2];
	test_context(0);
	CUgraph graph = graph_with_kernel(100), other = graph_with_kernel(100);
	OK(cuGraphAddEmptyNode(&nodes[1], graph, NULL, 0));
	OK(cuGraphGetNodes(graph, nodes, &(size_t){ 2 }));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphGetId(graph, &graph_id));
	OK(cuGraphGetId(other, &other_id));
	OK(cuGraphExecGetId(exec, &exec_id));
	CHECK(graph_id != other_id && graph_id != exec_id && other_id != exec_id);
	for (unsigned i = 0; i < 2; i++) {
		OK(cuGraphNodeGetContainingGraph(nodes[i], &found));
		CHECK(found == graph);
		OK(cuGraphNodeGetLocalId(nodes[i], &local));
		CHECK_EQUAL(local, i);
		OK(cuGraphNodeGetToolsId(nodes[i], &tools[i]));
	}
	CHECK(tools[0] != tools[1]);
	CHECK_EQUAL(cuGraphGetId((CUgraph)(void *)exec, &graph_id), CUDA_ERROR_INVALID_VALUE);
}

static void graph_is_printed_with_its_nodes_and_edges(void)
{
	char path[4096], text[4096] = "";
	CUgraphNode child;
	test_context(0);
	CUgraph graph = graph_with_kernel(100), inner = graph_with_kernel(100);
	size_t count = 1;
	CUgraphNode kernel;
	OK(cuGraphGetNodes(graph, &kernel, &count));
	OK(cuGraphAddChildGraphNode(&child, graph, &kernel, 1, inner));
	int fd = test_file(path, sizeof path);
	CHECK(fd >= 0);
	OK(cuGraphDebugDotPrint(graph, path, 0));
	CHECK(read(fd, text, sizeof text - 1) > 0);
	unlink(path);
	close(fd);
	CHECK(strncmp(text, "digraph", 7) == 0);
	CHECK(strstr(text, "KERNEL aliquot_spin") && strstr(text, "1 GRAPH") && strstr(text, "->"));
	CHECK_EQUAL(cuGraphDebugDotPrint(graph, "/nowhere/at/all", 0), CUDA_ERROR_OPERATING_SYSTEM);
}

/* ---- what does not exist --------------------------------------------------------------------------------------------- */

static void conditional_nodes_are_not_supported(void)
{
	CUgraph graph;
	CUgraphConditionalHandle handle;
	CUgraphNode node;
	CUgraphNodeParams conditional = { .type = CU_GRAPH_NODE_TYPE_CONDITIONAL };
	CUcontext context = test_context(0);
	OK(cuGraphCreate(&graph, 0));
	CHECK_EQUAL(cuGraphConditionalHandleCreate(&handle, graph, context, 0, 0), CUDA_ERROR_NOT_SUPPORTED);
	CHECK_EQUAL(cuGraphAddNode(&node, graph, NULL, 0, &conditional), CUDA_ERROR_NOT_SUPPORTED);
}

static const struct test_case cases[] = {
	CASE(last_reference_of_the_application_destroys, "t4x2"),
	CASE(graph_keeps_an_object_and_gives_it_back, "t4x2"),
	CASE(object_moves_to_a_graph, "t4x2"),
	CASE(clones_children_and_executable_graphs_keep_an_object, "t4x2"),
	CASE(launch_under_way_keeps_an_object, "t4x2"),
	CASE(update_replaces_the_objects_of_an_executable_graph, "t4x2"),
	CASE(slow_destructor_holds_no_call_up, "t4x2"),
	CASE(wrong_references_are_refused, "t4x2"),
	CASE(event_nodes_take_another_event, "t4x2"),
	CASE(kernel_nodes_have_attributes, "t4x2"),
	CASE(child_of_an_executable_graph_is_replaced_by_one_of_its_shape, "t4x2"),
	CASE(graphs_and_nodes_have_numbers, "t4x2"),
	CASE(graph_is_printed_with_its_nodes_and_edges, "t4x2"),
	CASE(conditional_nodes_are_not_supported, "t4x2"),
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, COUNT(cases));
}
