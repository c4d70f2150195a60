/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_graph_node.c - single nodes: their events, their child graph and the attributes of kernels; and the picture of a graph. */
#include <stdio.h>
#include <string.h>

#include "simulated_driver/graph.h"

static bool is_node_of(CUgraphNode node, CUgraphNodeType type)
{
	return sim_is_node(node) && node->type == type;
}

/* ---- events and children --------------------------------------------------------------------------------------------- */

static CUresult get_event(CUgraphNode node, CUgraphNodeType type, CUevent *out)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && is_node_of(node, type));
	*out = node->event;
	return CUDA_SUCCESS;
}

CUresult sim_graph_set_event(CUgraphNode node, CUgraphNodeType type, CUevent event)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(is_node_of(node, type));
	if (!sim_is(event, SIM_KIND_EVENT) || atomic_load(&event->destroyed))
		return CUDA_ERROR_INVALID_HANDLE;
	CUevent before = node->event;
	atomic_fetch_add(&event->references, 1);
	node->event = event;
	sim_event_release(before);
	return CUDA_SUCCESS;
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent *out)
{
	return get_event(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, out);
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event)
{
	return sim_graph_set_event(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent *out)
{
	return get_event(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, out);
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event)
{
	return sim_graph_set_event(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

/* Nodes of the child keep their place: handles of the one before name those of the new one. */
CUresult sim_graph_set_child(CUgraphNode node, CUgraph child)
{
	if (child->n_allocations)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUgraph clone = sim_graph_clone(child), before = node->child;
	if (!clone)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (CUgraphNode old = before->first, new = clone->first; old && new; old = old->next, new = new->next)
		new->original = old->original;
	node->child = clone;
	sim_graph_delete(before);
	return CUDA_SUCCESS;
}

/* ---- attributes of kernels ------------------------------------------------------------------------------------------- */

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue *value)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(value && is_node_of(node, CU_GRAPH_NODE_TYPE_KERNEL));
	switch ((int)attribute) {
	case CU_LAUNCH_ATTRIBUTE_PRIORITY: value->priority = node->kernel.priority; return CUDA_SUCCESS;
	case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: value->cooperative = node->kernel.launch.cooperative; return CUDA_SUCCESS;
	case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: *value = node->kernel.access_policy; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult set_cooperative(struct sim_kernel_node *kernel, bool cooperative)
{
	struct sim_launch launch = kernel->launch;
	uint64_t duration_ns;
	launch.cooperative = cooperative;
	SIM_TRY(sim_launch_duration(kernel->function, kernel->context->device, &launch, &duration_ns));
	kernel->launch.cooperative = cooperative;
	return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute, const CUkernelNodeAttrValue *value)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(value && is_node_of(node, CU_GRAPH_NODE_TYPE_KERNEL));
	switch ((int)attribute) {
	case CU_LAUNCH_ATTRIBUTE_PRIORITY: node->kernel.priority = value->priority; return CUDA_SUCCESS;
	case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: return set_cooperative(&node->kernel, value->cooperative != 0);
	case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: node->kernel.access_policy = *value; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(is_node_of(to, CU_GRAPH_NODE_TYPE_KERNEL) && is_node_of(from, CU_GRAPH_NODE_TYPE_KERNEL));
	SIM_TRY(set_cooperative(&to->kernel, from->kernel.launch.cooperative));
	to->kernel.priority = from->kernel.priority;
	to->kernel.access_policy = from->kernel.access_policy;
	return CUDA_SUCCESS;
}

/* ---- numbers --------------------------------------------------------------------------------------------------------- */

static unsigned number_of(CUgraphNode node)
{
	unsigned number = 0;
	for (CUgraphNode other = node->graph->first; other != node; other = other->next)
		number++;
	return number;
}

CUresult cuGraphGetId(CUgraph graph, unsigned int *id)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(id && sim_is_graph(graph));
	*id = (unsigned)graph->id;
	return CUDA_SUCCESS;
}

CUresult cuGraphExecGetId(CUgraphExec exec, unsigned int *id)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(id && sim_is(exec, SIM_KIND_EXEC));
	*id = (unsigned)exec->id;
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetContainingGraph(CUgraphNode node, CUgraph *out)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && sim_is_node(node));
	*out = node->graph;
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetLocalId(CUgraphNode node, unsigned int *id)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(id && sim_is_node(node));
	*id = number_of(node);
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetToolsId(CUgraphNode node, unsigned long long *id)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(id && sim_is_node(node));
	*id = (unsigned long long)node->graph->id << 32 | number_of(node);
	return CUDA_SUCCESS;
}

/* ---- the picture ----------------------------------------------------------------------------------------------------- */

static const char *type_name(CUgraphNodeType type)
{
	static const char *const names[] = { "KERNEL",      "MEMCPY",       "MEMSET",           "HOST",           "GRAPH",     "EMPTY",
					     "WAIT_EVENT",  "EVENT_RECORD", "EXT_SEMAS_SIGNAL", "EXT_SEMAS_WAIT", "MEM_ALLOC", "MEM_FREE",
					     "BATCH_MEM_OP" };
	return (size_t)type < sizeof names / sizeof *names ? names[type] : "OTHER";
}

static void print_graph(FILE *file, CUgraph graph)
{
	unsigned long long id = graph->id;
	fprintf(file, "subgraph cluster_%llu {\nlabel=\"graph_%llu\"\n", id, id);
	for (CUgraphNode node = graph->first; node; node = node->next) {
		unsigned number = number_of(node);
		const char *name = "";
		if (node->type == CU_GRAPH_NODE_TYPE_KERNEL)
			cuFuncGetName(&name, node->kernel.function);
		fprintf(file, "\"graph_%llu_node_%u\"[label=\"%u %s %s\"]\n", id, number, number, type_name(node->type), name);
		for (size_t i = 0; i < node->n_dependencies; i++)
			fprintf(file, "\"graph_%llu_node_%u\" -> \"graph_%llu_node_%u\"\n", id, number_of(node->dependencies[i]), id,
				number);
		if (node->type == CU_GRAPH_NODE_TYPE_GRAPH)
			print_graph(file, node->child);
	}
	fprintf(file, "}\n");
}

CUresult cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags)
{
	(void)flags;    /* more about the nodes than their kind and name is not known here */
	SIM_REQUIRE_READY();
	SIM_REQUIRE(sim_is_graph(graph) && path);
	FILE *file = fopen(path, "we");
	if (!file)
		return CUDA_ERROR_OPERATING_SYSTEM;
	fprintf(file, "digraph dot {\n");
	print_graph(file, graph);
	fprintf(file, "}\n");
	return fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
