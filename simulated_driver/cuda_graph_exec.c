/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_graph_exec.c - executable graphs: instantiation, updates, launches, and the memory that graphs allocate.
 *
 * Instantiation clones the graph and flattens the clone into one order in which every node comes behind what it depends on; a launch plays
 * that order as one item of the stream.
 *
 * Graph memory. An allocation node fixes its address when it is added and owns no memory. A launch (or upload) makes sure that the device
 * has reserved what the graph needs at its peak, beyond what earlier launches left unfreed. That stays reserved until cuDeviceGraphMemTrim,
 * so graphs that run one after the other share it. Memory that a graph allocates and does not free counts as used until it is freed.
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/graph.h"

static bool is_exec(CUgraphExec exec)
{
	return sim_is(exec, SIM_KIND_EXEC);
}

/* ---- from graph to program ------------------------------------------------------------------------------------------- */

/* All nodes of a graph, each behind what it depends on. Free the result; NULL without memory, or with a cycle and *cycle set. */
static CUgraphNode *in_order(CUgraph graph, bool *cycle)
{
	CUgraphNode *order = malloc((graph->n_nodes + 1) * sizeof *order);
	size_t done = 0;
	*cycle = false;
	if (!order)
		return NULL;
	for (CUgraphNode node = graph->first; node; node = node->next)
		node->visited = false;
	while (done < graph->n_nodes) {
		size_t before = done;
		for (CUgraphNode node = graph->first; node; node = node->next) {
			bool ready = !node->visited;
			for (size_t i = 0; i < node->n_dependencies && ready; i++)
				ready = node->dependencies[i]->visited;
			if (!ready)
				continue;
			node->visited = true;
			order[done++] = node;
		}
		if (done == before) {
			*cycle = true;
			free(order);
			return NULL;
		}
	}
	return order;
}

struct builder {
	struct sim_program *program;
	uint32_t capacity;
	uint64_t bytes, peak_bytes;         /* allocated by the graph so far on the way through it, and the most of that */
	struct sim_device *device;
};

static CUresult append(struct builder *builder, struct sim_work item)
{
	struct sim_program *program = builder->program;
	if (program->n_items == builder->capacity) {
		uint32_t capacity = builder->capacity * 2;
		program = realloc(program, sizeof *program + capacity * sizeof *program->items);
		if (!program)
			return CUDA_ERROR_OUT_OF_MEMORY;
		builder->program = program;
		builder->capacity = capacity;
	}
	if (item.kind == SIM_WORK_KERNEL) {
		program->n_kernels++;
		program->kernels_ns += item.duration_ns;
	}
	program->foreign |= item.foreign;
	program->items[program->n_items++] = item;
	return CUDA_SUCCESS;
}

static CUresult append_copy(struct builder *builder, CUgraphNode node)
{
	struct sim_work item = { .kind = SIM_WORK_COPY_3D };
	struct sim_copy_3d resolved;
	SIM_TRY(sim_copy_resolve(&node->copy, node->context->device, &resolved, &item.duration_ns));
	item.copy_3d = malloc(sizeof resolved);
	if (!item.copy_3d)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*item.copy_3d = resolved;
	CUresult result = append(builder, item);
	if (result != CUDA_SUCCESS)
		free(item.copy_3d);
	return result;
}

static CUresult append_touch(struct builder *builder, CUdeviceptr address, uint64_t bytes, struct sim_device *device)
{
	struct sim_program *program = builder->program;
	struct sim_program_touch *touches = realloc(program->touches, (program->n_touches + 1) * sizeof *touches);
	if (!touches)
		return CUDA_ERROR_OUT_OF_MEMORY;
	touches[program->n_touches++] = (struct sim_program_touch){ address, bytes, device };
	program->touches = touches;
	return CUDA_SUCCESS;
}

static CUresult append_kernel(struct builder *builder, const struct sim_kernel_node *node)
{
	struct sim_work item = { .kind = SIM_WORK_KERNEL };
	for (uint32_t i = 0; i < node->touched.count; i++)
		SIM_TRY(append_touch(builder, node->touched.addresses[i], 0, node->context->device));
	SIM_TRY(sim_launch_duration(node->function, node->context->device, &node->launch, &item.duration_ns));
	return append(builder, item);
}

static CUresult append_fill(struct builder *builder, CUgraphNode node)
{
	struct sim_work item = { .kind = SIM_WORK_FILL };
	SIM_TRY(sim_fill_resolve(&node->fill, node->context->device, &item.fill, &item.duration_ns));
	if (atomic_load(&sim_managed_made))
		SIM_TRY(append_touch(builder, node->fill.dst, sim_fill_span(&node->fill), node->context->device));
	return append(builder, item);
}

static CUresult append_event(struct builder *builder, CUgraphNode node)
{
	atomic_fetch_add(&node->event->references, 1);
	CUresult result = append(builder,
				 (struct sim_work){ .kind = node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? SIM_WORK_EVENT : SIM_WORK_WAIT,
						    .foreign = node->event->share,
						    .event = { node->event, 0 } });
	if (result != CUDA_SUCCESS)
		sim_event_release(node->event);
	return result;
}

static CUresult append_values(struct builder *builder, CUgraphNode node)
{
	struct sim_work work[SIM_MAX_VALUES];
	unsigned n_work;
	SIM_TRY(sim_values_resolve(node->batch.count, node->batch.paramArray, node->context->device, work, &n_work));
	for (unsigned i = 0; i < n_work; i++)
		SIM_TRY(append(builder, work[i]));
	return CUDA_SUCCESS;
}

static CUresult append_graph(struct builder *builder, CUgraph graph);

static CUresult append_node(struct builder *builder, CUgraphNode node)
{
	struct sim_work item = { .kind = SIM_WORK_MARK };
	const struct sim_graph_allocation *memory;
	if (node->disabled)
		return append(builder, item);
	switch (node->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL: return append_kernel(builder, &node->kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY: return append_copy(builder, node);
	case CU_GRAPH_NODE_TYPE_MEMSET: return append_fill(builder, node);
	case CU_GRAPH_NODE_TYPE_HOST:
		item.kind = SIM_WORK_HOST;
		item.host.run = node->host.fn;
		item.host.data = node->host.userData;
		return append(builder, item);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return append_values(builder, node);
	case CU_GRAPH_NODE_TYPE_GRAPH: return append_graph(builder, node->child);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return append_event(builder, node);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		builder->device = node->allocation.memory->device;
		builder->bytes += node->allocation.memory->bytes;
		if (builder->bytes > builder->peak_bytes)
			builder->peak_bytes = builder->bytes;
		return append(builder, item);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		memory = sim_graph_allocation_at(node->freed);
		SIM_REQUIRE(memory);
		builder->bytes -= memory->bytes < builder->bytes ? memory->bytes : builder->bytes;
		return append(builder, item);
	default: return append(builder, item);
	}
}

static CUresult append_graph(struct builder *builder, CUgraph graph)
{
	bool cycle;
	CUgraphNode *order = in_order(graph, &cycle);
	CUresult result = order ? CUDA_SUCCESS : cycle ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS && !sim_user_holds_add(&builder->program->user_holds, graph->user_holds))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t i = 0; i < graph->n_nodes && result == CUDA_SUCCESS; i++)
		result = append_node(builder, order[i]);
	free(order);
	return result;
}

static CUresult build(CUgraph graph, struct builder *builder)
{
	*builder = (struct builder){ .capacity = 16 };
	builder->program = calloc(1, sizeof *builder->program + builder->capacity * sizeof *builder->program->items);
	if (!builder->program)
		return CUDA_ERROR_OUT_OF_MEMORY;
	atomic_store(&builder->program->references, 1);
	CUresult result = append_graph(builder, graph);
	if (result != CUDA_SUCCESS)
		sim_program_release(builder->program);
	return result;
}

/* Make the exec run the present state of its clone. A launch in progress keeps the program it began with. */
static CUresult rebuild(CUgraphExec exec)
{
	struct builder builder;
	SIM_TRY(build(exec->graph, &builder));
	pthread_mutex_lock(&sim_graph_lock);
	struct sim_program *before = exec->program;
	exec->program = builder.program;
	exec->peak_bytes = builder.peak_bytes;
	exec->device = builder.device;
	pthread_mutex_unlock(&sim_graph_lock);
	if (before)
		sim_program_release(before);
	return CUDA_SUCCESS;
}

/* ---- instantiating --------------------------------------------------------------------------------------------------- */

static CUresult instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && sim_is_graph(graph) && !(flags & ~15ull));
	if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (graph->n_allocations && graph->n_execs)
		return CUDA_ERROR_NOT_SUPPORTED;    /* a graph that allocates has one address per allocation, so one exec at a time */
	CUgraphExec exec = sim_object_new(SIM_KIND_EXEC, sizeof *exec);
	if (!exec)
		return CUDA_ERROR_OUT_OF_MEMORY;
	exec->flags = flags;
	exec->graph = sim_graph_clone(graph);
	CUresult result = exec->graph ? rebuild(exec) : CUDA_ERROR_OUT_OF_MEMORY;
	if (result != CUDA_SUCCESS) {
		if (exec->graph)
			sim_graph_delete(exec->graph);
		sim_object_delete(exec);
		return result;
	}
	exec->id = sim_next_id();
	exec->source = graph;
	exec->source_id = graph->id;
	graph->n_execs++;
	*out = exec;
	return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	return instantiate(out, graph, flags);
}

static CUresult instantiate_with_log(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
	if (error_node)
		*error_node = NULL;
	if (log && log_bytes)
		log[0] = '\0';
	return instantiate(out, graph, 0);
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
	return instantiate_with_log(out, graph, error_node, log, log_bytes);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
	return instantiate_with_log(out, graph, error_node, log, log_bytes);
}

static CUresult reserve_for(CUgraphExec exec);

static CUresult instantiate_with_parameters(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	SIM_REQUIRE(p);
	p->hErrNode_out = NULL;
	CUresult result = instantiate(out, graph, p->flags);
	if (result == CUDA_SUCCESS && (p->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
		result = reserve_for(*out);
	p->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
	return result;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	return instantiate_with_parameters(out, graph, p);
}
CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
	return instantiate_with_parameters(out, graph, p);
}

CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags)
{
	SIM_REQUIRE(flags && is_exec(exec));
	*flags = exec->flags;
	return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(is_exec(exec));
	if (sim_is_graph(exec->source) && exec->source->id == exec->source_id)
		exec->source->n_execs--;
	sim_graph_delete(exec->graph);
	sim_program_release(exec->program);
	sim_object_delete(exec);
	return CUDA_SUCCESS;
}

/* ---- changing an exec ------------------------------------------------------------------------------------------------ */

static CUresult exec_node(CUgraphExec exec, CUgraphNode original, CUgraphNode *out)
{
	SIM_REQUIRE(is_exec(exec) && sim_is_node(original));
	*out = sim_graph_counterpart(exec->graph, original);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUgraphExecUpdateResult compare(CUgraph now, CUgraph wanted, CUgraphNode *culprit);

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode original, const CUDA_KERNEL_NODE_PARAMS *p)
{
	CUgraphNode node;
	SIM_REQUIRE(p);
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(cuGraphKernelNodeSetParams_v2(node, p));
	return rebuild(exec);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode original, const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	SIM_REQUIRE(p);
	CUDA_KERNEL_NODE_PARAMS wide = sim_graph_widened(p);
	return cuGraphExecKernelNodeSetParams_v2(exec, original, &wide);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode original, const CUDA_MEMCPY3D *copy, CUcontext context)
{
	CUgraphNode node;
	(void)context;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(cuGraphMemcpyNodeSetParams(node, copy));
	return rebuild(exec);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode original, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context)
{
	CUgraphNode node;
	(void)context;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(cuGraphMemsetNodeSetParams(node, fill));
	return rebuild(exec);
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode original, const CUDA_HOST_NODE_PARAMS *p)
{
	CUgraphNode node;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(cuGraphHostNodeSetParams(node, p));
	return rebuild(exec);
}

CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode original, const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
	CUgraphNode node;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(cuGraphBatchMemOpNodeSetParams(node, p));
	return rebuild(exec);
}

static CUresult set_event(CUgraphExec exec, CUgraphNode original, CUgraphNodeType type, CUevent event)
{
	CUgraphNode node;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(sim_graph_set_event(node, type, event));
	return rebuild(exec);
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode original, CUevent event)
{
	return set_event(exec, original, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode original, CUevent event)
{
	return set_event(exec, original, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

/* As cuGraphExecUpdate, for the graph of one node: it must have the same shape. */
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode original, CUgraph child)
{
	CUgraphNode node, culprit;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_REQUIRE(node->type == CU_GRAPH_NODE_TYPE_GRAPH && sim_is_graph(child));
	SIM_REQUIRE(compare(node->child, child, &culprit) == CU_GRAPH_EXEC_UPDATE_SUCCESS);
	SIM_TRY(sim_graph_set_child(node, child));
	return rebuild(exec);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode original, CUgraphNodeParams *p)
{
	CUgraphNode node;
	SIM_REQUIRE(p);
	SIM_TRY(exec_node(exec, original, &node));
	SIM_TRY(sim_graph_change_node(node, p));
	return rebuild(exec);
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode original, unsigned int enabled)
{
	CUgraphNode node;
	SIM_TRY(exec_node(exec, original, &node));
	SIM_REQUIRE(node->type == CU_GRAPH_NODE_TYPE_KERNEL || node->type == CU_GRAPH_NODE_TYPE_MEMCPY ||
		    node->type == CU_GRAPH_NODE_TYPE_MEMSET);
	node->disabled = !enabled;
	return rebuild(exec);
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode original, unsigned int *enabled)
{
	CUgraphNode node;
	SIM_REQUIRE(enabled);
	SIM_TRY(exec_node(exec, original, &node));
	*enabled = !node->disabled;
	return CUDA_SUCCESS;
}

/* An update takes over parameters from a graph of the same shape; nodes are compared pairwise in order of creation. */
static CUgraphExecUpdateResult compare(CUgraph now, CUgraph wanted, CUgraphNode *culprit)
{
	CUgraphNode a = now->first, b = wanted->first;
	*culprit = NULL;
	for (; a && b; a = a->next, b = b->next) {
		*culprit = b;
		if (a->type != b->type)
			return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
		if (a->n_dependencies != b->n_dependencies)
			return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
		if (a->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && a->allocation.memory != b->allocation.memory)
			return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
		if (a->type == CU_GRAPH_NODE_TYPE_KERNEL && a->kernel.context->device != b->kernel.context->device)
			return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
	}
	*culprit = b;
	return a || b ? CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED : CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static CUresult update(CUgraphExec exec, CUgraph wanted, CUgraphExecUpdateResultInfo *info)
{
	SIM_REQUIRE(is_exec(exec) && sim_is_graph(wanted) && info);
	*info = (CUgraphExecUpdateResultInfo){ .result = CU_GRAPH_EXEC_UPDATE_SUCCESS };
	info->result = compare(exec->graph, wanted, &info->errorNode);
	if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
		return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
	CUgraph clone = sim_graph_clone(wanted);
	if (!clone)
		return CUDA_ERROR_OUT_OF_MEMORY;
	/* Handles of the graph the exec was made from keep naming the same places in it. */
	for (CUgraphNode old = exec->graph->first, new = clone->first; old && new; old = old->next, new = new->next)
		new->original = old->original;
	CUgraph before = exec->graph;
	exec->graph = clone;
	CUresult result = rebuild(exec);
	if (result == CUDA_SUCCESS) {
		sim_graph_delete(before);
		return CUDA_SUCCESS;
	}
	exec->graph = before;
	sim_graph_delete(clone);
	info->result = CU_GRAPH_EXEC_UPDATE_ERROR;
	return result;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	return update(exec, graph, info);
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, CUgraphExecUpdateResult *result)
{
	CUgraphExecUpdateResultInfo info = { 0 };
	SIM_REQUIRE(result);
	CUresult status = update(exec, graph, &info);
	*result = info.result;
	if (error_node)
		*error_node = info.errorNode;
	return status;
}

/* ---- graph memory ---------------------------------------------------------------------------------------------------- */

/* See to it that `bytes` more than what is used now are reserved. The memory lock is held. */
static bool reserve(struct sim_device *device, uint64_t bytes)
{
	struct sim_graph_memory *memory = &device->graph_memory;
	uint64_t needed = memory->used + bytes;
	if (needed > memory->reserved) {
		uint64_t more = needed - memory->reserved;
		if (!sim_memory_charge(device, more) && !(sim_pools_release_all(device) && sim_memory_charge(device, more)))
			return false;
		memory->reserved = needed;
	}
	if (memory->reserved > memory->reserved_high)
		memory->reserved_high = memory->reserved;
	return true;
}

static CUresult reserve_for(CUgraphExec exec)
{
	struct sim_device *device = exec->device;
	if (!device)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&device->memory.lock);
	bool reserved = reserve(device, exec->peak_bytes);
	pthread_mutex_unlock(&device->memory.lock);
	return reserved ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Under sim_graph_lock: this allocation comes to life, or ends. */
static void set_live(struct sim_graph_allocation *memory, bool live)
{
	struct sim_graph_memory *counts = &memory->device->graph_memory;
	if (memory->live == live)
		return;
	memory->live = live;
	pthread_mutex_lock(&memory->device->memory.lock);
	counts->used = live ? counts->used + memory->bytes : counts->used - memory->bytes;
	pthread_mutex_unlock(&memory->device->memory.lock);
}

static bool freed_inside(CUgraph graph, CUdeviceptr address)
{
	for (CUgraphNode node = graph->first; node; node = node->next)
		if (node->type == CU_GRAPH_NODE_TYPE_MEM_FREE && node->freed == address)
			return true;
	return false;
}

static bool anything_live(CUgraph graph)
{
	for (CUgraphNode node = graph->first; node; node = node->next)
		if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && node->allocation.memory->live)
			return true;
	return false;
}

static void free_live(CUgraph graph)
{
	for (CUgraphNode node = graph->first; node; node = node->next)
		if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
			set_live(node->allocation.memory, false);
}

/* What a launch does to graph memory, reckoned when it is submitted. sim_graph_lock is held. */
static CUresult account_launch(CUgraphExec exec)
{
	struct sim_device *device = exec->device;
	if (!device)
		return CUDA_SUCCESS;
	if (anything_live(exec->graph)) {
		SIM_REQUIRE(exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
		free_live(exec->graph);
	}
	SIM_TRY(reserve_for(exec));
	pthread_mutex_lock(&device->memory.lock);
	if (device->graph_memory.used + exec->peak_bytes > device->graph_memory.used_high)
		device->graph_memory.used_high = device->graph_memory.used + exec->peak_bytes;
	pthread_mutex_unlock(&device->memory.lock);
	for (CUgraphNode node = exec->graph->first; node; node = node->next)
		if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && !freed_inside(exec->graph, node->allocation.parameters.dptr))
			set_live(node->allocation.memory, true);
	return CUDA_SUCCESS;
}

/* A free node may end what another graph allocated. sim_graph_lock is held. */
static void account_frees(CUgraph graph)
{
	for (CUgraphNode node = graph->first; node; node = node->next) {
		struct sim_graph_allocation *memory = node->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? sim_graph_allocation_at(node->freed)
												: NULL;
		if (memory)
			set_live(memory, false);
	}
}

CUresult sim_graph_free_allocation(CUdeviceptr address)
{
	pthread_mutex_lock(&sim_graph_lock);
	struct sim_graph_allocation *memory = sim_graph_allocation_at(address);
	bool live = memory && memory->live;
	if (live) {
		set_live(memory, false);
		memory->references++;
		sim_graph_allocation_release(memory);     /* the addresses end with it when its graph no longer exists */
	}
	pthread_mutex_unlock(&sim_graph_lock);
	return live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal, CUgraphMem_attribute attribute, void *value)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(value);
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	CUresult result = CUDA_SUCCESS;
	pthread_mutex_lock(&device->memory.lock);
	switch (attribute) {
	case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = device->graph_memory.used; break;
	case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = device->graph_memory.used_high; break;
	case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = device->graph_memory.reserved; break;
	case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = device->graph_memory.reserved_high; break;
	default: result = CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_unlock(&device->memory.lock);
	return result;
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice ordinal, CUgraphMem_attribute attribute, void *value)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(value && *(cuuint64_t *)value == 0);
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	CUresult result = CUDA_SUCCESS;
	pthread_mutex_lock(&device->memory.lock);
	if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
		device->graph_memory.used_high = device->graph_memory.used;
	else if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
		device->graph_memory.reserved_high = device->graph_memory.reserved;
	else
		result = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&device->memory.lock);
	return result;
}

CUresult cuDeviceGraphMemTrim(CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	SIM_TRY(sim_capture_unsafe_call());
	if (atomic_load(&device->engine.pending_graphs))
		return CUDA_SUCCESS;    /* a graph that runs is using it */
	pthread_mutex_lock(&device->memory.lock);
	sim_memory_uncharge(device, device->graph_memory.reserved - device->graph_memory.used);
	device->graph_memory.reserved = device->graph_memory.used;
	pthread_mutex_unlock(&device->memory.lock);
	return CUDA_SUCCESS;
}

/* ---- launching ------------------------------------------------------------------------------------------------------- */

static CUresult upload(CUgraphExec exec, CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(is_exec(exec));
	if (sim_capturing(stream))
		return sim_capture_refuse(stream);
	return reserve_for(exec);
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream s)
{
	return upload(exec, s);
}
CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream s)
{
	return upload(exec, sim_own(s));
}

static CUresult launch(CUgraphExec exec, CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(is_exec(exec));
	if (sim_capturing(stream))
		return sim_capture_graph(stream, exec->graph);
	pthread_mutex_lock(&sim_graph_lock);
	CUresult result = account_launch(exec);
	struct sim_program *program = exec->program;
	if (result == CUDA_SUCCESS) {
		account_frees(exec->graph);
		atomic_fetch_add(&program->references, 1);
	}
	pthread_mutex_unlock(&sim_graph_lock);
	if (result != CUDA_SUCCESS)
		return result;
	sim_program_touch(program);
	if (program->n_items == 0) {
		sim_program_release(program);
		return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_MARK });
	}
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_GRAPH, .foreign = program->foreign, .program = program });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream s)
{
	return launch(exec, s);
}
CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream s)
{
	return launch(exec, sim_own(s));
}
