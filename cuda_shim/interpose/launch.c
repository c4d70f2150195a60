/* SPDX-License-Identifier: Apache-2.0 */
/* Launches that take memory: graphs with allocation nodes.
 *
 * The driver backs such nodes when the graph is uploaded or launched, from the device's graph memory, and may share memory between
 * nodes. The sum of a graph's nodes is an upper bound, charged while the graph is launched. When the bound does not fit the limit, the
 * graph is uploaded first, which takes the memory without running anything and can be undone, and what it truly took decides. A graph
 * that ran last of all is launched again without a charge: what it needs is still there. */
#include "interpose/launch.h"

#include <stdlib.h>
#include <string.h>

#include "account/map.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/outputs.h"
#include "interpose/pace.h"
#include "interpose/reservoir.h"
#include "interpose/unpaced.h"
#include "shim.h"

#define PAGE_BYTES ((uint64_t)2 << 20) /* each node's memory is backed by whole pages */
#define NESTING_MAX 16

/* What one executable graph needs, in the order of the devices (which is the order its gates are taken in). */
struct needs {
	uint64_t graph; /* a unique number */
	unsigned count;
	struct {
		CUdevice ordinal;
		uint64_t bytes;
	} device[AQ_MAX_DEVICES];
};

/* Executable graph -> its needs (owner). Graphs without allocation nodes are not in it. */
static struct aq_map execs;
static _Atomic unsigned execs_count;
static _Atomic uint64_t graphs_seen;

/* ---- learning what a graph needs ------------------------------------------------------------------------------- */

static bool need(struct needs *needs, CUdevice ordinal, uint64_t bytes)
{
	unsigned at = 0;

	while (at < needs->count && needs->device[at].ordinal < ordinal)
		at++;
	if (at == needs->count || needs->device[at].ordinal != ordinal) {
		if (needs->count == AQ_MAX_DEVICES)
			return false;
		memmove(&needs->device[at + 1], &needs->device[at], (needs->count - at) * sizeof(needs->device[0]));
		needs->device[at].ordinal = ordinal;
		needs->device[at].bytes = 0;
		needs->count++;
	}
	needs->device[at].bytes += (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
	return true;
}

static bool add_graph(struct needs *needs, CUgraph graph, unsigned nesting);

static bool add_node(struct needs *needs, CUgraphNode node, unsigned nesting)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params;
	CUgraphNodeType type;
	CUdevice ordinal;
	CUgraph child;

	if (aq_cuda.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS)
		return false;
	if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
		return aq_cuda.cuGraphMemAllocNodeGetParams(node, &params) == CUDA_SUCCESS &&
		       aq_place_of_location(&params.poolProps.location, params.poolProps.allocType, &ordinal) == CUDA_SUCCESS &&
		       (ordinal == AQ_NO_ORDINAL || need(needs, ordinal, params.bytesize));
	if (type == CU_GRAPH_NODE_TYPE_GRAPH)
		return aq_cuda.cuGraphChildGraphNodeGetGraph(node, &child) == CUDA_SUCCESS && add_graph(needs, child, nesting + 1);
	return true;
}

/* False when the driver does not report it, or without memory for the query. */
static bool add_graph(struct needs *needs, CUgraph graph, unsigned nesting)
{
	size_t count = 0;
	bool complete = true;

	if (nesting > NESTING_MAX || aq_cuda.cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS)
		return false;
	if (!count)
		return true;
	CUgraphNode *nodes = calloc(count, sizeof(CUgraphNode));
	if (!nodes)
		return false;
	complete = aq_cuda.cuGraphGetNodes(graph, nodes, &count) == CUDA_SUCCESS;
	for (size_t i = 0; complete && i < count; i++)
		complete = add_node(needs, nodes[i], nesting);
	free(nodes);
	return complete;
}

static bool remember(CUgraphExec exec, const struct needs *needs)
{
	struct needs *copy = malloc(sizeof(*copy));
	struct aq_entry entry = { .key = (uintptr_t)exec, .owner = (uintptr_t)copy };

	if (!copy || !aq_map_put(&execs, &entry)) {
		free(copy);
		return false;
	}
	*copy = *needs;
	copy->graph = atomic_fetch_add(&graphs_seen, 1) + 1;
	atomic_fetch_add(&execs_count, 1);
	return true;
}

static bool needs_of(CUgraphExec exec, struct needs *needs)
{
	struct aq_entry entry;

	if (!atomic_load_explicit(&execs_count, memory_order_acquire) || !aq_map_get(&execs, (uintptr_t)exec, &entry))
		return false;
	*needs = *(const struct needs *)(uintptr_t)entry.owner;
	return true;
}

void aq_graphs_forget(void)
{
	aq_map_forget(&execs);
	atomic_store(&execs_count, 0);
}

/* ---- brackets on every device of a graph ----------------------------------------------------------------------- */

struct graph_call {
	CUresult (*run)(CUgraphExec, CUstream);
	CUresult (*upload)(CUgraphExec, CUstream);
	CUgraphExec exec;
	CUstream stream;
	bool per_thread;
};

struct brackets {
	const struct needs *needs;
	struct aq_growth growth[AQ_MAX_DEVICES];
};

/* Close them all; `graph` has run, 0 = no graph has. False when a device is past its limit; then what the call `undone`, if any, took there
 * is given back. */
static bool end_all(struct brackets *brackets, unsigned count, uint64_t graph, const struct graph_call *undone)
{
	bool fits = true;

	for (unsigned i = count; i-- > 0;) {
		aq_growth_close_gate(&brackets->growth[i]);
		brackets->growth[i].graph = graph;
		brackets->growth[i].failed = !graph;
		if (aq_growth_end(&brackets->growth[i]))
			continue;
		fits = false;
		if (undone)
			aq_growth_undone(&brackets->growth[i], undone->stream, undone->per_thread);
		else
			aq_growth_open_gate(&brackets->growth[i]);
	}
	return fits;
}

/* Open them all: for each device's bound if it fits at once, otherwise for 0 bytes. The gates are released, because the call may wait for
 * the device. */
static bool begin_all(struct brackets *brackets, const struct needs *needs, bool bound)
{
	brackets->needs = needs;
	for (unsigned i = 0; i < needs->count; i++) {
		struct aq_reservoir *reservoir = aq_reservoir_of_graphs(needs->device[i].ordinal);

		if (!reservoir || !aq_growth_begin(&brackets->growth[i], reservoir, bound ? needs->device[i].bytes : 0, AQ_AT_ONCE)) {
			end_all(brackets, i, 0, NULL);
			return false;
		}
		brackets->growth[i].most_bytes = needs->device[i].bytes;
		aq_growth_open_gate(&brackets->growth[i]);
	}
	return true;
}

static CUresult refuse(const struct needs *needs)
{
	for (unsigned i = 0; i < needs->count; i++)
		aq_refused(aq_device_of(needs->device[i].ordinal), needs->device[i].bytes);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- launching ------------------------------------------------------------------------------------------------- */

/* The bound does not fit: let an upload show what the graph truly takes. */
static CUresult prepare(const struct graph_call *call, const struct needs *needs)
{
	struct brackets brackets;

	for (unsigned i = 0; i < 2 && begin_all(&brackets, needs, false); i++) {
		CUresult result = call->upload(call->exec, call->stream);

		if (end_all(&brackets, needs->count, result == CUDA_SUCCESS ? needs->graph : 0, call))
			return result;
		for (unsigned j = 0; j < needs->count; j++)
			aq_reclaim(aq_device_of(needs->device[j].ordinal));
	}
	return refuse(needs);
}

static void repeat_end_all(const struct needs *needs, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		aq_repeat_end(aq_reservoir_of_graphs(needs->device[i].ordinal));
}

static bool repeat_begin_all(const struct needs *needs)
{
	for (unsigned i = 0; i < needs->count; i++) {
		struct aq_reservoir *reservoir = aq_reservoir_of_graphs(needs->device[i].ordinal);

		if (!reservoir || !aq_repeat_begin(reservoir, needs->graph)) {
			repeat_end_all(needs, i);
			return false;
		}
	}
	return true;
}

static CUresult run_charged(const struct graph_call *call)
{
	struct brackets brackets;
	struct needs needs;

	if (!needs_of(call->exec, &needs))
		return call->run(call->exec, call->stream);
	if (repeat_begin_all(&needs)) {
		CUresult result = call->run(call->exec, call->stream);

		repeat_end_all(&needs, needs.count);
		return result;
	}
	if (!begin_all(&brackets, &needs, true)) {
		CUresult result = prepare(call, &needs);

		if (result != CUDA_SUCCESS)
			return result;
		if (!begin_all(&brackets, &needs, false))
			return refuse(&needs);
	}
	CUresult result = call->run(call->exec, call->stream);
	end_all(&brackets, needs.count, result == CUDA_SUCCESS ? needs.graph : 0, NULL);
	return result;
}

#define GRAPH_CALL(name, suffix, is_per_thread)                                                                        \
	(&(struct graph_call){ .run = aq_cuda.name##suffix, .upload = aq_cuda.cuGraphUpload##suffix, .exec = exec,     \
			       .stream = stream, .per_thread = is_per_thread })

#define GRAPH_UPLOAD_HOOK(suffix, is_per_thread)                                                                       \
	CUresult cuGraphUpload##suffix(CUgraphExec exec, CUstream stream)                                              \
	{                                                                                                              \
		AQ_LIMITED_OR_RETURN(cuGraphUpload##suffix(exec, stream));                                             \
		return run_charged(GRAPH_CALL(cuGraphUpload, suffix, is_per_thread));                                  \
	}

/* A launch is also work: it pays as one kernel with the cost of the whole graph. */
#define GRAPH_LAUNCH_HOOK(suffix, is_per_thread)                                                                       \
	CUresult cuGraphLaunch##suffix(CUgraphExec exec, CUstream stream)                                              \
	{                                                                                                              \
		struct aq_work work = { .function = exec, .stream = stream, .per_thread = is_per_thread };             \
		struct aq_ticket ticket = { 0 };                                                                       \
		AQ_LIMITED_OR_RETURN(cuGraphLaunch##suffix(exec, stream));                                             \
		CUresult result = aq_unpaced() ? CUDA_SUCCESS : aq_pace_begin(&ticket, &work);                       \
		if (result != CUDA_SUCCESS)                                                                            \
			return result;                                                                                 \
		result = run_charged(GRAPH_CALL(cuGraphLaunch, suffix, is_per_thread));                                \
		aq_pace_end(&ticket, &work, result);                                                                   \
		return result;                                                                                         \
	}

GRAPH_LAUNCH_HOOK(, false)
GRAPH_LAUNCH_HOOK(_ptsz, true)
GRAPH_UPLOAD_HOOK(, false)
GRAPH_UPLOAD_HOOK(_ptsz, true)

/* ---- instantiating --------------------------------------------------------------------------------------------- */

/* A new executable graph: learn its needs, and settle what the driver took for it already. On refusal the graph is as if never
 * instantiated. */
static CUresult settle_new(CUgraphExec made, CUgraph graph)
{
	struct needs needs = { 0 };
	struct brackets brackets;
	bool complete = add_graph(&needs, graph, 0);

	if (complete && !needs.count)
		return CUDA_SUCCESS;
	if (complete && begin_all(&brackets, &needs, false) && end_all(&brackets, needs.count, 0, NULL) && remember(made, &needs))
		return CUDA_SUCCESS;
	aq_cuda.cuGraphExecDestroy(made); /* a graph with uncounted memory must not exist */
	for (unsigned i = 0; i < needs.count; i++)
		aq_reservoirs_trim(aq_device_of(needs.device[i].ordinal));
	return refuse(&needs);
}

struct instantiation {
	CUresult (*with_log)(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
	CUresult (*with_params)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);
	CUgraphNode *error_node;
	char *log;
	size_t log_bytes;
	unsigned long long flags;
	CUDA_GRAPH_INSTANTIATE_PARAMS *params;
};

static CUresult make(const struct instantiation *call, CUgraphExec *exec, CUgraph graph)
{
	if (call->with_log)
		return call->with_log(exec, graph, call->error_node, call->log, call->log_bytes);
	if (call->with_params)
		return call->with_params(exec, graph, call->params);
	return aq_cuda.cuGraphInstantiateWithFlags(exec, graph, call->flags);
}

/* A driver may write a node and text although it succeeds. */
static CUresult instantiate(CUgraphExec *exec, CUgraph graph, const struct instantiation *call)
{
	struct aq_outputs outputs = { 0 };
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	if (!exec)
		return make(call, exec, graph); /* the driver reports the error */
	if (aq_outputs_keep(&outputs, exec, sizeof(*exec)) && aq_outputs_keep(&outputs, call->error_node, sizeof(*call->error_node)) &&
	    aq_outputs_keep(&outputs, call->log, call->log_bytes) && aq_outputs_keep(&outputs, call->params, sizeof(*call->params)))
		result = make(call, exec, graph);
	if (result == CUDA_SUCCESS) {
		aq_pace_new_graph(*exec);
		result = settle_new(*exec, graph);
		if (result != CUDA_SUCCESS)
			aq_outputs_put_back(&outputs);
	}
	aq_outputs_forget(&outputs);
	return result;
}

#define WITH_LOG_HOOK(name)                                                                                            \
	CUresult name(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)          \
	{                                                                                                              \
		AQ_LIMITED_OR_RETURN(name(exec, graph, error_node, log, log_bytes));                                   \
		return instantiate(exec, graph, &(struct instantiation){ .with_log = aq_cuda.name, .error_node = error_node, \
									 .log = log, .log_bytes = log_bytes });        \
	}

#define WITH_PARAMS_HOOK(name)                                                                                         \
	CUresult name(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)                         \
	{                                                                                                              \
		AQ_LIMITED_OR_RETURN(name(exec, graph, params));                                                       \
		return instantiate(exec, graph, &(struct instantiation){ .with_params = aq_cuda.name, .params = params }); \
	}

WITH_LOG_HOOK(cuGraphInstantiate)
WITH_LOG_HOOK(cuGraphInstantiate_v2)
WITH_PARAMS_HOOK(cuGraphInstantiateWithParams)
WITH_PARAMS_HOOK(cuGraphInstantiateWithParams_ptsz)

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	AQ_LIMITED_OR_RETURN(cuGraphInstantiateWithFlags(exec, graph, flags));
	return instantiate(exec, graph, &(struct instantiation){ .flags = flags });
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	struct aq_entry entry;

	AQ_LIMITED_OR_RETURN(cuGraphExecDestroy(exec));
	bool known = aq_map_take(&execs, (uintptr_t)exec, &entry);
	CUresult result = aq_cuda.cuGraphExecDestroy(exec);
	if (!known)
		return result;
	if (result != CUDA_SUCCESS) {
		aq_map_put(&execs, &entry);
		return result;
	}
	struct needs *needs = (struct needs *)(uintptr_t)entry.owner;
	for (unsigned i = 0; i < needs->count; i++)
		aq_reservoirs_settle(aq_device_of(needs->device[i].ordinal));
	free(needs);
	atomic_fetch_sub(&execs_count, 1);
	return result;
}

CUresult cuDeviceGraphMemTrim(CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuDeviceGraphMemTrim(ordinal));
	CUresult result = aq_cuda.cuDeviceGraphMemTrim(ordinal);

	if (result == CUDA_SUCCESS)
		aq_reservoirs_settle(aq_device_of(ordinal));
	return result;
}
