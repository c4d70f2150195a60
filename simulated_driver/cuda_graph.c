/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_graph.c - building graphs: nodes, dependencies, parameters, clones. Playing them is in cuda_graph_exec.c, capturing in
 * cuda_capture.c.
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/graph.h"

pthread_mutex_t sim_graph_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- nodes ----------------------------------------------------------------------------------------------------------- */

CUgraph sim_graph_of_node(CUgraphNode node)
{
	return node->graph;
}

static CUgraphNode node_new(CUgraph graph, CUgraphNodeType type)
{
	CUgraphNode node = sim_object_new(SIM_KIND_NODE, sizeof *node);
	if (!node)
		return NULL;
	node->graph = graph;
	node->type = type;
	if (graph->last)
		graph->last->next = node;
	else
		graph->first = node;
	graph->last = node;
	graph->n_nodes++;
	return node;
}

void sim_graph_allocation_release(struct sim_graph_allocation *memory)
{
	if (--memory->references || memory->live)
		return;
	sim_large_delete(memory->large);
	free(memory);
}

static void node_free(CUgraphNode node)
{
	switch (node->type) {
	case CU_GRAPH_NODE_TYPE_GRAPH:
		if (node->child)
			sim_graph_delete(node->child);
		break;
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		if (node->event)
			sim_event_release(node->event);
		break;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: free(node->batch.paramArray); break;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		pthread_mutex_lock(&sim_graph_lock);
		if (node->allocation.memory)
			sim_graph_allocation_release(node->allocation.memory);
		pthread_mutex_unlock(&sim_graph_lock);
		break;
	default: break;
	}
	free(node->dependencies);
	sim_object_delete(node);
}

CUgraph sim_graph_new(void)
{
	CUgraph graph = sim_object_new(SIM_KIND_GRAPH, sizeof *graph);
	if (graph)
		graph->id = sim_next_id();
	return graph;
}

struct sim_user_hold **sim_graph_user_holds(CUgraph graph)
{
	return &graph->user_holds;
}

void sim_graph_delete(CUgraph graph)
{
	sim_user_holds_release(&graph->user_holds);
	while (graph->first) {
		CUgraphNode node = graph->first;
		graph->first = node->next;
		node_free(node);
	}
	sim_object_delete(graph);
}

static bool depends_directly(CUgraphNode node, CUgraphNode on)
{
	for (size_t i = 0; i < node->n_dependencies; i++)
		if (node->dependencies[i] == on)
			return true;
	return false;
}

CUresult sim_graph_depend(CUgraphNode node, const CUgraphNode *on, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (depends_directly(node, on[i]))
			continue;
		if (node->n_dependencies == node->capacity) {
			size_t capacity = node->capacity ? node->capacity * 2 : 4;
			CUgraphNode *grown = realloc(node->dependencies, capacity * sizeof *grown);
			if (!grown)
				return CUDA_ERROR_OUT_OF_MEMORY;
			node->dependencies = grown;
			node->capacity = capacity;
		}
		node->dependencies[node->n_dependencies++] = on[i];
	}
	return CUDA_SUCCESS;
}

static void unvisit(CUgraph graph)
{
	for (CUgraphNode node = graph->first; node; node = node->next)
		node->visited = false;
}

/* Depth first from `node` towards what it depends on. Chains can be long, so the way back is kept on an explicit stack. */
static bool reaches(CUgraphNode node, CUgraphNode wanted)
{
	size_t depth = 0;
	CUgraphNode *stack = malloc((node->graph->n_nodes + 1) * sizeof *stack);
	bool found = false;
	if (!stack)
		return false;
	stack[depth++] = node;
	node->visited = true;
	while (depth && !found) {
		CUgraphNode at = stack[--depth];
		found = at == wanted;
		for (size_t i = 0; i < at->n_dependencies && !found; i++)
			if (!at->dependencies[i]->visited) {
				at->dependencies[i]->visited = true;
				stack[depth++] = at->dependencies[i];
			}
	}
	free(stack);
	return found;
}

bool sim_graph_leads_to(CUgraphNode from, CUgraphNode to)
{
	pthread_mutex_lock(&sim_graph_lock);
	unvisit(to->graph);
	bool found = from->graph == to->graph && reaches(to, from);
	pthread_mutex_unlock(&sim_graph_lock);
	return found;
}

/* ---- making nodes, without dependencies ------------------------------------------------------------------------------ */

static CUresult set_kernel(CUgraphNode node, CUfunction function, CUcontext context, const struct sim_launch *launch)
{
	uint64_t duration_ns;
	struct sim_kernel_node *kernel = &node->kernel;
	SIM_TRY(sim_launch_duration(function, context->device, launch, &duration_ns));      /* all launch errors show here */
	SIM_TRY(sim_function_prepare(function, context));
	*kernel = (struct sim_kernel_node){ .function = function,
					    .context = context,
					    .launch = *launch,
					    .priority = kernel->priority,
					    .access_policy = kernel->access_policy };
	sim_launch_touched(function, launch, &kernel->touched);
	if (function->spins)
		kernel->first_parameter = duration_ns / 1000;
	kernel->parameters[0] = &kernel->first_parameter;
	kernel->launch.parameters = kernel->parameters;
	kernel->launch.extra = NULL;
	return CUDA_SUCCESS;
}

/* Take a node out of its graph and free it. */
static void node_discard(CUgraph graph, CUgraphNode node)
{
	CUgraphNode *at = &graph->first, before = NULL;
	while (*at != node) {
		before = *at;
		at = &(*at)->next;
	}
	*at = node->next;
	if (graph->last == node)
		graph->last = before;
	graph->n_nodes--;
	node_free(node);
}

CUresult sim_graph_add_kernel(CUgraph graph, CUfunction function, CUcontext context, const struct sim_launch *launch, CUgraphNode *out)
{
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_KERNEL);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->context = context;
	CUresult result = set_kernel(node, function, context, launch);
	if (result == CUDA_SUCCESS)
		*out = node;
	else
		node_discard(graph, node);
	return result;
}

CUresult sim_graph_add_copy(CUgraph graph, const CUDA_MEMCPY3D *copy, CUcontext context, CUgraphNode *out)
{
	struct sim_copy_3d resolved;
	uint64_t duration_ns;
	SIM_REQUIRE(copy->WidthInBytes && copy->Height && copy->Depth);
	SIM_TRY(sim_copy_resolve(copy, context->device, &resolved, &duration_ns));
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_MEMCPY);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->context = context;
	node->copy = *copy;
	*out = node;
	return CUDA_SUCCESS;
}

CUresult sim_graph_add_fill(CUgraph graph, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context, CUgraphNode *out)
{
	struct sim_fill resolved;
	uint64_t duration_ns;
	SIM_TRY(sim_fill_resolve(fill, context->device, &resolved, &duration_ns));
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_MEMSET);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->context = context;
	node->fill = *fill;
	*out = node;
	return CUDA_SUCCESS;
}

CUresult sim_graph_add_host(CUgraph graph, CUhostFn run, void *data, CUgraphNode *out)
{
	SIM_REQUIRE(run);
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_HOST);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->host = (CUDA_HOST_NODE_PARAMS){ run, data };
	*out = node;
	return CUDA_SUCCESS;
}

static bool copy_batch(CUDA_BATCH_MEM_OP_NODE_PARAMS *to, const CUDA_BATCH_MEM_OP_NODE_PARAMS *from)
{
	CUstreamBatchMemOpParams *operations = malloc((from->count + 1) * sizeof *operations);
	if (!operations)
		return false;
	if (from->count)
		memcpy(operations, from->paramArray, from->count * sizeof *operations);
	*to = *from;
	to->paramArray = operations;
	return true;
}

/* As cuStreamBatchMemOp: all errors show here, and the caller's array is not used later. */
static CUresult check_batch(const CUDA_BATCH_MEM_OP_NODE_PARAMS *batch, CUcontext context)
{
	struct sim_work work[SIM_MAX_VALUES];
	unsigned n_work;
	SIM_REQUIRE(batch->flags == 0);
	return sim_values_resolve(batch->count, batch->paramArray, context->device, work, &n_work);
}

CUresult sim_graph_add_values(CUgraph graph, const CUDA_BATCH_MEM_OP_NODE_PARAMS *batch, CUcontext context, CUgraphNode *out)
{
	SIM_TRY(check_batch(batch, context));
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->context = context;
	if (!copy_batch(&node->batch, batch)) {
		node_discard(graph, node);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*out = node;
	return CUDA_SUCCESS;
}

static CUresult add_event(CUgraph graph, CUevent event, CUgraphNodeType type, CUgraphNode *out)
{
	if (!sim_is(event, SIM_KIND_EVENT) || atomic_load(&event->destroyed))
		return CUDA_ERROR_INVALID_HANDLE;
	CUgraphNode node = node_new(graph, type);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	atomic_fetch_add(&event->references, 1);
	node->event = event;
	*out = node;
	return CUDA_SUCCESS;
}

static CUresult add_empty(CUgraph graph, CUgraphNode *out)
{
	*out = node_new(graph, CU_GRAPH_NODE_TYPE_EMPTY);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_graph_add_allocation(CUgraph graph, const CUmemPoolProps *properties, size_t bytes, CUdeviceptr *address, CUgraphNode *out)
{
	CUresult why;
	struct sim_device *device = sim_device_at(&properties->location, &why);
	SIM_REQUIRE(properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && device && bytes);
	if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (bytes > device->domain.capacity_bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct sim_graph_allocation *memory = calloc(1, sizeof *memory);
	struct sim_large *large = memory ? sim_large_new(device, SIM_LARGE_GRAPH, NULL, bytes) : NULL;
	CUgraphNode node = large ? node_new(graph, CU_GRAPH_NODE_TYPE_MEM_ALLOC) : NULL;
	if (!node) {
		if (large)
			sim_large_delete(large);
		free(memory);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*memory = (struct sim_graph_allocation){
		.large = large, .device = device, .bytes = large->granules * SIM_GRANULE_BYTES, .references = 1
	};
	large->graph_allocation = memory;
	node->allocation.memory = memory;
	node->allocation.parameters = (CUDA_MEM_ALLOC_NODE_PARAMS){ .poolProps = *properties, .bytesize = bytes, .dptr = large->base };
	graph->n_allocations++;
	*address = large->base;
	*out = node;
	return CUDA_SUCCESS;
}

struct sim_graph_allocation *sim_graph_allocation_at(CUdeviceptr address)
{
	struct sim_range range;
	bool found = sim_memory_find(address, &range) && range.large && range.large->use == SIM_LARGE_GRAPH && range.base == address;
	return found ? range.large->graph_allocation : NULL;
}

CUresult sim_graph_add_free(CUgraph graph, CUdeviceptr address, CUgraphNode *out)
{
	SIM_REQUIRE(sim_graph_allocation_at(address));
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_MEM_FREE);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->freed = address;
	*out = node;
	return CUDA_SUCCESS;
}

/* ---- cloning --------------------------------------------------------------------------------------------------------- */

static bool copy_payload(CUgraphNode to, CUgraphNode from);

CUgraphNode sim_graph_counterpart(CUgraph clone, CUgraphNode original)
{
	for (CUgraphNode node = clone->first; node; node = node->next)
		if (node->original == original)
			return node;
	return NULL;
}

static bool copy_dependencies(CUgraph graph)
{
	for (CUgraphNode from = graph->first; from; from = from->next)
		for (size_t i = 0; i < from->n_dependencies; i++)
			if (sim_graph_depend(from->twin, &from->dependencies[i]->twin, 1) != CUDA_SUCCESS)
				return false;
	return true;
}

CUgraph sim_graph_clone(CUgraph graph)
{
	CUgraph clone = sim_graph_new();
	if (!clone)
		return NULL;
	clone->n_allocations = graph->n_allocations;
	bool ok = sim_user_holds_add(&clone->user_holds, graph->user_holds);
	for (CUgraphNode from = graph->first; from && ok; from = from->next) {
		from->twin = node_new(clone, from->type);
		ok = from->twin && copy_payload(from->twin, from);
	}
	if (ok && copy_dependencies(graph))
		return clone;
	sim_graph_delete(clone);
	return NULL;
}

static bool copy_payload(CUgraphNode to, CUgraphNode from)
{
	to->original = from;
	to->context = from->context;
	to->disabled = from->disabled;
	switch (from->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		to->kernel = from->kernel;
		to->kernel.parameters[0] = &to->kernel.first_parameter;
		to->kernel.launch.parameters = to->kernel.parameters;
		return true;
	case CU_GRAPH_NODE_TYPE_MEMCPY: to->copy = from->copy; return true;
	case CU_GRAPH_NODE_TYPE_MEMSET: to->fill = from->fill; return true;
	case CU_GRAPH_NODE_TYPE_HOST: to->host = from->host; return true;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return copy_batch(&to->batch, &from->batch);
	case CU_GRAPH_NODE_TYPE_GRAPH: to->child = sim_graph_clone(from->child); return to->child != NULL;
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		atomic_fetch_add(&from->event->references, 1);
		to->event = from->event;
		return true;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		pthread_mutex_lock(&sim_graph_lock);
		to->allocation = from->allocation;
		to->allocation.memory->references++;
		pthread_mutex_unlock(&sim_graph_lock);
		return true;
	case CU_GRAPH_NODE_TYPE_MEM_FREE: to->freed = from->freed; return true;
	default: return true;
	}
}

CUresult sim_graph_add_child(CUgraph graph, CUgraph child, CUgraphNode *out)
{
	SIM_REQUIRE(sim_is(child, SIM_KIND_GRAPH) && child != graph);
	if (child->n_allocations)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUgraph clone = sim_graph_clone(child);
	CUgraphNode node = clone ? node_new(graph, CU_GRAPH_NODE_TYPE_GRAPH) : NULL;
	if (!node) {
		if (clone)
			sim_graph_delete(clone);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	node->child = clone;
	*out = node;
	return CUDA_SUCCESS;
}

/* Does it free all that it allocates? */
static bool keeps_nothing(CUgraph graph)
{
	for (CUgraphNode made = graph->first; made; made = made->next) {
		bool freed = made->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC;
		for (CUgraphNode node = graph->first; node && !freed; node = node->next)
			freed = node->type == CU_GRAPH_NODE_TYPE_MEM_FREE && node->freed == made->allocation.parameters.dptr;
		if (!freed)
			return false;
	}
	return true;
}

/* The child belongs to the node from here on. It is not copied, so it may allocate, unlike others; what it would keep is not supported. */
static CUresult move_child(CUgraph graph, CUgraph child, CUgraphNode *out)
{
	SIM_REQUIRE(sim_is(child, SIM_KIND_GRAPH) && child != graph);
	if (!keeps_nothing(child))
		return CUDA_ERROR_NOT_SUPPORTED;
	CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_GRAPH);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->child = child;
	graph->n_allocations += child->n_allocations;
	*out = node;
	return CUDA_SUCCESS;
}

/* ---- graphs: entry points -------------------------------------------------------------------------------------------- */

static bool is_node_of(CUgraphNode node, CUgraphNodeType type)
{
	return sim_is_node(node) && node->type == type;
}

CUresult cuGraphCreate(CUgraph *out, unsigned int flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && flags == 0);
	*out = sim_graph_new();
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphDestroy(CUgraph graph)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(sim_is_graph(graph));
	sim_graph_delete(graph);
	return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *out, CUgraph graph)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && sim_is_graph(graph));
	if (graph->n_allocations)
		return CUDA_ERROR_NOT_SUPPORTED;
	*out = sim_graph_clone(graph);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && sim_is_node(original) && sim_is_graph(clone));
	*out = sim_graph_counterpart(clone, original);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Every add call: check the graph and what the new node is to depend on, before it is made. */
static CUresult check_add(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && sim_is_graph(graph) && (count == 0 || dependencies));
	for (size_t i = 0; i < count; i++)
		SIM_REQUIRE(sim_is_node(dependencies[i]) && dependencies[i]->graph == graph);
	return CUDA_SUCCESS;
}

static CUresult context_or_current(CUcontext given, CUcontext *context)
{
	if (!given)
		return sim_current(context);
	if (!sim_is(given, SIM_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	*context = given;
	return sim_context_check(given);
}

static struct sim_launch launch_of(const CUDA_KERNEL_NODE_PARAMS *p)
{
	return (struct sim_launch){ { p->gridDimX, p->gridDimY, p->gridDimZ },
				    { p->blockDimX, p->blockDimY, p->blockDimZ },
				    p->sharedMemBytes,
				    false,
				    p->kernelParams,
				    p->extra };
}

static CUfunction function_of(const CUDA_KERNEL_NODE_PARAMS *p)
{
	return p->func ? p->func : (CUfunction)(void *)p->kern;
}

CUDA_KERNEL_NODE_PARAMS sim_graph_widened(const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	CUDA_KERNEL_NODE_PARAMS wide = { 0 };
	memcpy(&wide, p, sizeof *p);
	return wide;
}

static CUresult add_kernel(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_KERNEL_NODE_PARAMS *p)
{
	CUcontext context;
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(context_or_current(p->ctx, &context));
	struct sim_launch launch = launch_of(p);
	SIM_TRY(sim_graph_add_kernel(graph, function_of(p), context, &launch, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_KERNEL_NODE_PARAMS *p)
{
	SIM_REQUIRE(p);
	return add_kernel(out, graph, on, count, p);
}

CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	SIM_REQUIRE(p);
	CUDA_KERNEL_NODE_PARAMS wide = sim_graph_widened(p);
	return add_kernel(out, graph, on, count, &wide);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEMCPY3D *copy,
			      CUcontext given)
{
	CUcontext context;
	SIM_REQUIRE(copy);
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(context_or_current(given, &context));
	SIM_TRY(sim_graph_add_copy(graph, copy, context, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEMSET_NODE_PARAMS *fill,
			      CUcontext given)
{
	CUcontext context;
	SIM_REQUIRE(fill);
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(context_or_current(given, &context));
	SIM_TRY(sim_graph_add_fill(graph, fill, context, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_HOST_NODE_PARAMS *p)
{
	SIM_REQUIRE(p);
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(sim_graph_add_host(graph, p->fn, p->userData, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUgraph child)
{
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(sim_graph_add_child(graph, child, out));
	return sim_graph_depend(*out, on, count);
}

static CUresult add_child(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_CHILD_GRAPH_NODE_PARAMS *p)
{
	if (p->ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE)
		return cuGraphAddChildGraphNode(out, graph, on, count, p->graph);
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(move_child(graph, p->graph, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count)
{
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(add_empty(graph, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUevent event)
{
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(add_event(graph, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUevent event)
{
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(add_event(graph, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddBatchMemOpNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count,
				  const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
	CUcontext context;
	SIM_REQUIRE(p);
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(context_or_current(p->ctx, &context));
	SIM_TRY(sim_graph_add_values(graph, p, context, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
	SIM_REQUIRE(p);
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(sim_graph_add_allocation(graph, &p->poolProps, p->bytesize, &p->dptr, out));
	return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUdeviceptr address)
{
	SIM_TRY(check_add(out, graph, on, count));
	SIM_TRY(sim_graph_add_free(graph, address, out));
	return sim_graph_depend(*out, on, count);
}

static CUresult add_any(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUgraphNodeParams *p)
{
	CUDA_MEMSET_NODE_PARAMS fill;
	CUDA_HOST_NODE_PARAMS host;
	SIM_REQUIRE(p && p->reserved0[0] == 0 && p->reserved0[1] == 0 && p->reserved0[2] == 0 && p->reserved2 == 0);
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL: return add_kernel(out, graph, on, count, &p->kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY: return cuGraphAddMemcpyNode(out, graph, on, count, &p->memcpy.copyParams, p->memcpy.copyCtx);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		memcpy(&fill, &p->memset, sizeof fill);
		return cuGraphAddMemsetNode(out, graph, on, count, &fill, p->memset.ctx);
	case CU_GRAPH_NODE_TYPE_HOST:
		host = (CUDA_HOST_NODE_PARAMS){ p->host.fn, p->host.userData };
		return cuGraphAddHostNode(out, graph, on, count, &host);
	case CU_GRAPH_NODE_TYPE_GRAPH: return add_child(out, graph, on, count, &p->graph);
	case CU_GRAPH_NODE_TYPE_EMPTY: return cuGraphAddEmptyNode(out, graph, on, count);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return cuGraphAddEventWaitNode(out, graph, on, count, p->eventWait.event);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return cuGraphAddEventRecordNode(out, graph, on, count, p->eventRecord.event);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return cuGraphAddMemAllocNode(out, graph, on, count, &p->alloc);
	case CU_GRAPH_NODE_TYPE_MEM_FREE: return cuGraphAddMemFreeNode(out, graph, on, count, p->free.dptr);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return cuGraphAddBatchMemOpNode(out, graph, on, count, &p->memOp);
	default: return CUDA_ERROR_NOT_SUPPORTED;
	}
}

/* Kernels compute nothing here, so no condition would ever change: conditional nodes do not exist. */
CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *out, CUgraph graph, CUcontext context, unsigned int value,
					unsigned int flags)
{
	(void)context, (void)value, (void)flags;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && sim_is_graph(graph));
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, CUgraphNodeParams *p)
{
	return add_any(out, graph, on, count, p);
}

/* Ports and programmatic edges are for kernels that talk to one another; a plain edge has no data. */
static bool plain_edges(const CUgraphEdgeData *edges, size_t count)
{
	static const CUgraphEdgeData plain;
	for (size_t i = 0; edges && i < count; i++)
		if (memcmp(&edges[i], &plain, sizeof plain) != 0)
			return false;
	return true;
}

CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, const CUgraphEdgeData *edges, size_t count,
			   CUgraphNodeParams *p)
{
	if (!plain_edges(edges, count))
		return CUDA_ERROR_NOT_SUPPORTED;
	return add_any(out, graph, on, count, p);
}

/* ---- parameters of nodes --------------------------------------------------------------------------------------------- */

static void describe_kernel(const struct sim_kernel_node *kernel, CUDA_KERNEL_NODE_PARAMS *out)
{
	const struct sim_launch *launch = &kernel->launch;
	*out = (CUDA_KERNEL_NODE_PARAMS){ .func = kernel->function,
					  .gridDimX = launch->grid[0],
					  .gridDimY = launch->grid[1],
					  .gridDimZ = launch->grid[2],
					  .blockDimX = launch->block[0],
					  .blockDimY = launch->block[1],
					  .blockDimZ = launch->block[2],
					  .sharedMemBytes = launch->shared_bytes,
					  .kernelParams = kernel->launch.parameters,
					  .ctx = kernel->context };
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_KERNEL));
	describe_kernel(&node->kernel, out);
	return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *out)
{
	CUDA_KERNEL_NODE_PARAMS wide;
	SIM_REQUIRE(out);
	SIM_TRY(cuGraphKernelNodeGetParams_v2(node, &wide));
	memcpy(out, &wide, sizeof *out);
	return CUDA_SUCCESS;
}

static CUresult change_kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	CUcontext context = node->kernel.context;
	struct sim_launch launch = launch_of(p);
	if (p->ctx)
		SIM_TRY(context_or_current(p->ctx, &context));
	return set_kernel(node, function_of(p), context, &launch);
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
	SIM_REQUIRE(p && is_node_of(node, CU_GRAPH_NODE_TYPE_KERNEL));
	return change_kernel(node, p);
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	SIM_REQUIRE(p);
	CUDA_KERNEL_NODE_PARAMS wide = sim_graph_widened(p);
	return cuGraphKernelNodeSetParams_v2(node, &wide);
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_MEMCPY));
	*out = node->copy;
	return CUDA_SUCCESS;
}

static CUresult change_copy(CUgraphNode node, const CUDA_MEMCPY3D *copy)
{
	struct sim_copy_3d resolved;
	uint64_t duration_ns;
	SIM_TRY(sim_copy_resolve(copy, node->context->device, &resolved, &duration_ns));
	node->copy = *copy;
	return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *copy)
{
	SIM_REQUIRE(copy && is_node_of(node, CU_GRAPH_NODE_TYPE_MEMCPY));
	return change_copy(node, copy);
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_MEMSET));
	*out = node->fill;
	return CUDA_SUCCESS;
}

static CUresult change_fill(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill)
{
	struct sim_fill resolved;
	uint64_t duration_ns;
	SIM_TRY(sim_fill_resolve(fill, node->context->device, &resolved, &duration_ns));
	node->fill = *fill;
	return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill)
{
	SIM_REQUIRE(fill && is_node_of(node, CU_GRAPH_NODE_TYPE_MEMSET));
	return change_fill(node, fill);
}

CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_HOST));
	*out = node->host;
	return CUDA_SUCCESS;
}

CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *p)
{
	SIM_REQUIRE(p && p->fn && is_node_of(node, CU_GRAPH_NODE_TYPE_HOST));
	node->host = *p;
	return CUDA_SUCCESS;
}

CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP));
	*out = node->batch;     /* the array is the node's, and valid as long as it is */
	return CUDA_SUCCESS;
}

static CUresult change_batch(CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
	CUstreamBatchMemOpParams *before = node->batch.paramArray;
	SIM_TRY(check_batch(p, node->context));
	if (!copy_batch(&node->batch, p))
		return CUDA_ERROR_OUT_OF_MEMORY;
	free(before);
	return CUDA_SUCCESS;
}

CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
	SIM_REQUIRE(p && is_node_of(node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP));
	return change_batch(node, p);
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_GRAPH));
	*out = node->child;
	return CUDA_SUCCESS;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC));
	*out = node->allocation.parameters;
	return CUDA_SUCCESS;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *out)
{
	SIM_REQUIRE(out && is_node_of(node, CU_GRAPH_NODE_TYPE_MEM_FREE));
	*out = node->freed;
	return CUDA_SUCCESS;
}

CUresult sim_graph_change_node(CUgraphNode node, CUgraphNodeParams *p)
{
	CUDA_MEMSET_NODE_PARAMS fill;
	SIM_REQUIRE(p->type == node->type);
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL: return change_kernel(node, &p->kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY: return change_copy(node, &p->memcpy.copyParams);
	case CU_GRAPH_NODE_TYPE_MEMSET: memcpy(&fill, &p->memset, sizeof fill); return change_fill(node, &fill);
	case CU_GRAPH_NODE_TYPE_HOST:
		SIM_REQUIRE(p->host.fn);
		node->host = (CUDA_HOST_NODE_PARAMS){ p->host.fn, p->host.userData };
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return change_batch(node, &p->memOp);
	default: return CUDA_ERROR_NOT_SUPPORTED;
	}
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *p)
{
	SIM_REQUIRE(p && sim_is_node(node));
	return sim_graph_change_node(node, p);
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
	SIM_REQUIRE(type && sim_is_node(node));
	*type = node->type;
	return CUDA_SUCCESS;
}

/* ---- structure ------------------------------------------------------------------------------------------------------- */

/* Lists are answered in two steps: with no array only the count; else as many as there is room for, the rest of the room NULL. */
struct node_list {
	CUgraphNode *nodes;
	size_t room, count;
};

static void list_add(struct node_list *list, CUgraphNode node)
{
	if (list->nodes && list->count < list->room)
		list->nodes[list->count] = node;
	list->count++;
}

static void list_end(struct node_list *list, size_t *count)
{
	for (size_t i = list->count; list->nodes && i < list->room; i++)
		list->nodes[i] = NULL;
	*count = list->nodes && list->count > list->room ? list->room : list->count;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	SIM_REQUIRE(count && sim_is_graph(graph));
	struct node_list list = { nodes, *count, 0 };
	for (CUgraphNode node = graph->first; node; node = node->next)
		list_add(&list, node);
	list_end(&list, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	SIM_REQUIRE(count && sim_is_graph(graph));
	struct node_list list = { nodes, *count, 0 };
	for (CUgraphNode node = graph->first; node; node = node->next)
		if (node->n_dependencies == 0)
			list_add(&list, node);
	list_end(&list, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
	SIM_REQUIRE(count && sim_is_graph(graph) && !from == !to);
	struct node_list sources = { from, *count, 0 }, targets = { to, *count, 0 };
	for (CUgraphNode node = graph->first; node; node = node->next)
		for (size_t i = 0; i < node->n_dependencies; i++) {
			list_add(&sources, node->dependencies[i]);
			list_add(&targets, node);
		}
	list_end(&sources, count);
	list_end(&targets, count);
	return CUDA_SUCCESS;
}

static void clear_edges(CUgraphEdgeData *edges, size_t count)
{
	if (edges)
		memset(edges, 0, count * sizeof *edges);
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edges, size_t *count)
{
	SIM_TRY(cuGraphGetEdges(graph, from, to, count));
	clear_edges(edges, *count);
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
	SIM_REQUIRE(count && sim_is_node(node));
	struct node_list list = { nodes, *count, 0 };
	for (size_t i = 0; i < node->n_dependencies; i++)
		list_add(&list, node->dependencies[i]);
	list_end(&list, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges, size_t *count)
{
	SIM_TRY(cuGraphNodeGetDependencies(node, nodes, count));
	clear_edges(edges, *count);
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
	SIM_REQUIRE(count && sim_is_node(node));
	struct node_list list = { nodes, *count, 0 };
	for (CUgraphNode other = node->graph->first; other; other = other->next)
		if (depends_directly(other, node))
			list_add(&list, other);
	list_end(&list, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges, size_t *count)
{
	SIM_TRY(cuGraphNodeGetDependentNodes(node, nodes, count));
	clear_edges(edges, *count);
	return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	SIM_REQUIRE(sim_is_graph(graph) && (count == 0 || (from && to)));
	for (size_t i = 0; i < count; i++)
		SIM_REQUIRE(sim_is_node(from[i]) && sim_is_node(to[i]) && from[i]->graph == graph && to[i]->graph == graph &&
			    from[i] != to[i] && !depends_directly(to[i], from[i]));
	for (size_t i = 0; i < count; i++)
		SIM_TRY(sim_graph_depend(to[i], &from[i], 1));
	return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
				   size_t count)
{
	if (!plain_edges(edges, count))
		return CUDA_ERROR_NOT_SUPPORTED;
	return cuGraphAddDependencies(graph, from, to, count);
}

static void undepend(CUgraphNode node, CUgraphNode on)
{
	for (size_t i = 0; i < node->n_dependencies; i++)
		if (node->dependencies[i] == on) {
			node->dependencies[i] = node->dependencies[--node->n_dependencies];
			return;
		}
}

CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	SIM_REQUIRE(sim_is_graph(graph) && (count == 0 || (from && to)));
	for (size_t i = 0; i < count; i++)
		SIM_REQUIRE(sim_is_node(from[i]) && sim_is_node(to[i]) && to[i]->graph == graph && depends_directly(to[i], from[i]));
	for (size_t i = 0; i < count; i++)
		undepend(to[i], from[i]);
	return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
				      size_t count)
{
	if (!plain_edges(edges, count))
		return CUDA_ERROR_NOT_SUPPORTED;
	return cuGraphRemoveDependencies(graph, from, to, count);
}

CUresult cuGraphDestroyNode(CUgraphNode node)
{
	SIM_REQUIRE(sim_is_node(node));
	if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node->type == CU_GRAPH_NODE_TYPE_MEM_FREE)
		return CUDA_ERROR_NOT_SUPPORTED;
	for (CUgraphNode other = node->graph->first; other; other = other->next)
		undepend(other, node);
	node_discard(node->graph, node);
	return CUDA_SUCCESS;
}
