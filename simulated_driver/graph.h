/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graph.h - what the two halves of graphs share: cuda_graph.c builds them, cuda_graph_exec.c plays them.
 *
 * A graph is a list of nodes with dependencies. One thread at a time may build or change a given graph, as in CUDA. What graphs share (the
 * memory of allocation nodes) is under sim_graph_lock, which is never held while waiting.
 */
#ifndef ALIQUOT_SIM_GRAPH_H
#define ALIQUOT_SIM_GRAPH_H

#include "simulated_driver/cuda_internal.h"

/* Memory made by an allocation node; shared by the graph, its clones and execs. Counters are under sim_graph_lock. */
struct sim_graph_allocation {
	struct sim_large *large;
	struct sim_device *device;
	uint64_t bytes;                     /* whole pages */
	uint32_t references;
	bool live;                          /* allocated by a launch and not freed */
};

struct sim_kernel_node {
	CUfunction function;
	CUcontext context;
	struct sim_launch launch;
	uint64_t first_parameter;           /* all that is looked at for its duration; see cuda_launch.c */
	struct sim_touched touched;
	int priority;
	CUlaunchAttributeValue access_policy;
	void *parameters[1];
};

struct CUgraphNode_st {
	struct sim_object object;
	CUgraph graph;
	CUgraphNodeType type;
	CUgraphNode original;               /* in a clone: the node that this one copies */
	CUgraphNode *dependencies;
	size_t n_dependencies, capacity;
	bool disabled;
	bool visited;                       /* scratch of walks */
	CUgraphNode twin;                   /* scratch of cloning */
	CUcontext context;
	union {
		struct sim_kernel_node kernel;
		CUDA_MEMCPY3D copy;
		CUDA_MEMSET_NODE_PARAMS fill;
		CUDA_HOST_NODE_PARAMS host;
		CUDA_BATCH_MEM_OP_NODE_PARAMS batch; /* with an array of its own */
		CUgraph child;
		CUevent event;
		struct {
			CUDA_MEM_ALLOC_NODE_PARAMS parameters;
			struct sim_graph_allocation *memory;
		} allocation;
		CUdeviceptr freed;
	};
	CUgraphNode next;
};

struct CUgraph_st {
	struct sim_object object;
	CUgraphNode first, last;
	size_t n_nodes;
	uint32_t n_allocations, n_execs;
	struct sim_user_hold *user_holds;
	uint64_t id;
};

struct CUgraphExec_st {
	struct sim_object object;
	CUgraph graph;                      /* a clone of its own */
	CUgraph source;                     /* what it was made from, if that still lives: then its id is source_id */
	uint64_t source_id;
	struct sim_program *program;
	uint64_t id;
	unsigned long long flags;
	struct sim_device *device;          /* of its allocations; NULL without */
	uint64_t peak_bytes;
};

extern pthread_mutex_t sim_graph_lock;

static inline bool sim_is_graph(CUgraph graph)
{
	return sim_is(graph, SIM_KIND_GRAPH);
}
static inline bool sim_is_node(CUgraphNode node)
{
	return sim_is(node, SIM_KIND_NODE);
}

CUgraph sim_graph_clone(CUgraph graph);
CUgraphNode sim_graph_counterpart(CUgraph clone, CUgraphNode original);     /* NULL: none */
/* One reference less; the memory's addresses go with the last one, unless it is live. sim_graph_lock is held. */
void sim_graph_allocation_release(struct sim_graph_allocation *memory);
struct sim_graph_allocation *sim_graph_allocation_at(CUdeviceptr address);  /* NULL: not memory of a graph */

/* Changes to a node's parameters, for graphs and, on their clones, for execs. */
CUDA_KERNEL_NODE_PARAMS sim_graph_widened(const CUDA_KERNEL_NODE_PARAMS_v1 *parameters);
CUresult sim_graph_set_event(CUgraphNode node, CUgraphNodeType type, CUevent event);
CUresult sim_graph_set_child(CUgraphNode node, CUgraph child);
CUresult sim_graph_change_node(CUgraphNode node, CUgraphNodeParams *parameters);

#endif
