/*
 * cuda_graph.c - graphs: building them, instantiating them into programs for the engine, launching them, and the memory they allocate.
 *
 * A graph is a list of nodes with dependencies. Instantiation clones it and flattens the clone into one order in which every node comes
 * behind what it depends on; a launch plays that order as one item of the stream.
 *
 * Graph memory. An allocation node fixes its address when it is added and owns no memory. A launch (or upload) makes sure that the device has
 * reserved what the graph needs at its peak on top of what earlier launches left unfreed; that stays reserved until cuDeviceGraphMemTrim, so
 * graphs that run one after the other share it. What a graph allocates and does not free counts as used until somebody frees it.
 */
#include <stdlib.h>
#include <string.h>

#include "sim/cuda_internal.h"

/* Memory made by an allocation node; shared by the graph, its clones and execs. Counters are under graph_lock. */
struct sim_graph_allocation {
    struct sim_large *large;
    struct sim_device *device;
    uint64_t bytes;                     /* whole pages */
    uint32_t references;
    bool live;                          /* allocated by a launch and not freed */
};

struct kernel_node {
    CUfunction function;
    CUcontext context;
    struct sim_launch launch;
    uint64_t first_parameter;           /* all that is ever looked at; see cuda_launch.c */
    void *parameters[1];
};

struct CUgraphNode_st {
    struct sim_object object;
    CUgraph graph;
    CUgraphNodeType type;
    CUgraphNode original;               /* in a clone: the node this one stands for */
    CUgraphNode *dependencies;
    size_t n_dependencies, capacity;
    bool disabled;
    bool visited;                       /* scratch of walks */
    CUgraphNode twin;                   /* scratch of cloning */
    CUcontext context;
    union {
        struct kernel_node kernel;
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS fill;
        CUDA_HOST_NODE_PARAMS host;
        CUgraph child;
        CUevent event;
        struct { CUDA_MEM_ALLOC_NODE_PARAMS parameters; struct sim_graph_allocation *memory; } allocation;
        CUdeviceptr freed;
    };
    CUgraphNode next;
};

struct CUgraph_st {
    struct sim_object object;
    CUgraphNode first, last;
    size_t n_nodes;
    uint32_t n_allocations, n_execs;
    uint64_t id;
};

struct CUgraphExec_st {
    struct sim_object object;
    CUgraph graph;                      /* a clone of its own */
    CUgraph source;                     /* what it was made from, if that still lives: then its id is source_id */
    uint64_t source_id;
    struct sim_program *program;
    unsigned long long flags;
    struct sim_device *device;          /* of its allocations; NULL without */
    uint64_t peak_bytes;
};

/* Graphs may be built by one thread at a time each, but allocations and handles are shared: one lock for all of them, never held while waiting. */
static pthread_mutex_t graph_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- nodes ----------------------------------------------------------------------------------------------------------- */

CUgraph sim_graph_of_node(CUgraphNode node) { return node->graph; }

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

static void allocation_release(struct sim_graph_allocation *memory)
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
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        pthread_mutex_lock(&graph_lock);
        if (node->allocation.memory)
            allocation_release(node->allocation.memory);
        pthread_mutex_unlock(&graph_lock);
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

void sim_graph_delete(CUgraph graph)
{
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
    pthread_mutex_lock(&graph_lock);
    unvisit(to->graph);
    bool found = from->graph == to->graph && reaches(to, from);
    pthread_mutex_unlock(&graph_lock);
    return found;
}

/* ---- making nodes, without dependencies ------------------------------------------------------------------------------ */

static CUresult set_kernel(CUgraphNode node, CUfunction function, CUcontext context, const struct sim_launch *launch)
{
    uint64_t duration_ns;
    struct kernel_node *kernel = &node->kernel;
    SIM_TRY(sim_launch_duration(function, context->device, launch, &duration_ns));      /* all launch errors show here */
    *kernel = (struct kernel_node){ .function = function, .context = context, .launch = *launch };
    if (function->spins)
        kernel->first_parameter = duration_ns / 1000;
    kernel->parameters[0] = &kernel->first_parameter;
    kernel->launch.parameters = kernel->parameters;
    kernel->launch.extra = NULL;
    return CUDA_SUCCESS;
}

/* A node made for checked parameters, or none. */
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
    struct sim_device *device = sim_device_of(properties->location.id);
    SIM_REQUIRE(properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && device && bytes);
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
    *memory = (struct sim_graph_allocation){ .large = large, .device = device, .bytes = large->granules * SIM_GRANULE_BYTES, .references = 1 };
    large->graph_allocation = memory;
    node->allocation.memory = memory;
    node->allocation.parameters = (CUDA_MEM_ALLOC_NODE_PARAMS){ .poolProps = *properties, .bytesize = bytes, .dptr = large->base };
    graph->n_allocations++;
    *address = large->base;
    *out = node;
    return CUDA_SUCCESS;
}

static struct sim_graph_allocation *allocation_at(CUdeviceptr address)
{
    struct sim_range range;
    bool found = sim_memory_find(address, &range) && range.large && range.large->use == SIM_LARGE_GRAPH && range.base == address;
    return found ? range.large->graph_allocation : NULL;
}

CUresult sim_graph_add_free(CUgraph graph, CUdeviceptr address, CUgraphNode *out)
{
    SIM_REQUIRE(allocation_at(address));
    CUgraphNode node = node_new(graph, CU_GRAPH_NODE_TYPE_MEM_FREE);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->freed = address;
    *out = node;
    return CUDA_SUCCESS;
}

/* ---- cloning --------------------------------------------------------------------------------------------------------- */

static bool copy_payload(CUgraphNode to, CUgraphNode from);

static CUgraphNode counterpart(CUgraph clone, CUgraphNode original)
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

static CUgraph clone_graph(CUgraph graph)
{
    CUgraph clone = sim_graph_new();
    if (!clone)
        return NULL;
    clone->n_allocations = graph->n_allocations;
    bool ok = true;
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
    case CU_GRAPH_NODE_TYPE_GRAPH: to->child = clone_graph(from->child); return to->child != NULL;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        atomic_fetch_add(&from->event->references, 1);
        to->event = from->event;
        return true;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        pthread_mutex_lock(&graph_lock);
        to->allocation = from->allocation;
        to->allocation.memory->references++;
        pthread_mutex_unlock(&graph_lock);
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
    CUgraph clone = clone_graph(child);
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

/* ---- graphs: entry points -------------------------------------------------------------------------------------------- */

static bool is_graph(CUgraph graph) { return sim_is(graph, SIM_KIND_GRAPH); }
static bool is_node(CUgraphNode node) { return sim_is(node, SIM_KIND_NODE); }
static bool is_exec(CUgraphExec exec) { return sim_is(exec, SIM_KIND_EXEC); }
static bool is_node_of(CUgraphNode node, CUgraphNodeType type) { return is_node(node) && node->type == type; }

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
    SIM_REQUIRE(is_graph(graph));
    sim_graph_delete(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *out, CUgraph graph)
{
    SIM_REQUIRE_READY();
    SIM_REQUIRE(out && is_graph(graph));
    if (graph->n_allocations)
        return CUDA_ERROR_NOT_SUPPORTED;
    *out = clone_graph(graph);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone)
{
    SIM_REQUIRE_READY();
    SIM_REQUIRE(out && is_node(original) && is_graph(clone));
    *out = counterpart(clone, original);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Every add call: check the graph and what the new node is to depend on, before it is made. */
static CUresult check_add(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
    SIM_REQUIRE_READY();
    SIM_REQUIRE(out && is_graph(graph) && (count == 0 || dependencies));
    for (size_t i = 0; i < count; i++)
        SIM_REQUIRE(is_node(dependencies[i]) && dependencies[i]->graph == graph);
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
    return (struct sim_launch){ { p->gridDimX, p->gridDimY, p->gridDimZ }, { p->blockDimX, p->blockDimY, p->blockDimZ }, p->sharedMemBytes, false,
                                p->kernelParams, p->extra };
}

static CUfunction function_of(const CUDA_KERNEL_NODE_PARAMS *p) { return p->func ? p->func : (CUfunction)(void *)p->kern; }

static CUDA_KERNEL_NODE_PARAMS widened(const CUDA_KERNEL_NODE_PARAMS_v1 *p)
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
    CUDA_KERNEL_NODE_PARAMS wide = widened(p);
    return add_kernel(out, graph, on, count, &wide);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEMCPY3D *copy, CUcontext given)
{
    CUcontext context;
    SIM_REQUIRE(copy);
    SIM_TRY(check_add(out, graph, on, count));
    SIM_TRY(context_or_current(given, &context));
    SIM_TRY(sim_graph_add_copy(graph, copy, context, out));
    return sim_graph_depend(*out, on, count);
}

CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, size_t count, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext given)
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
    case CU_GRAPH_NODE_TYPE_GRAPH: return cuGraphAddChildGraphNode(out, graph, on, count, p->graph.graph);
    case CU_GRAPH_NODE_TYPE_EMPTY: return cuGraphAddEmptyNode(out, graph, on, count);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return cuGraphAddEventWaitNode(out, graph, on, count, p->eventWait.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return cuGraphAddEventRecordNode(out, graph, on, count, p->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return cuGraphAddMemAllocNode(out, graph, on, count, &p->alloc);
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return cuGraphAddMemFreeNode(out, graph, on, count, p->free.dptr);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
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

CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *on, const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *p)
{
    if (!plain_edges(edges, count))
        return CUDA_ERROR_NOT_SUPPORTED;
    return add_any(out, graph, on, count, p);
}

/* ---- parameters of nodes --------------------------------------------------------------------------------------------- */

static void describe_kernel(const struct kernel_node *kernel, CUDA_KERNEL_NODE_PARAMS *out)
{
    const struct sim_launch *launch = &kernel->launch;
    *out = (CUDA_KERNEL_NODE_PARAMS){ .func = kernel->function, .gridDimX = launch->grid[0], .gridDimY = launch->grid[1], .gridDimZ = launch->grid[2],
                                      .blockDimX = launch->block[0], .blockDimY = launch->block[1], .blockDimZ = launch->block[2],
                                      .sharedMemBytes = launch->shared_bytes, .kernelParams = kernel->launch.parameters, .ctx = kernel->context };
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
    CUDA_KERNEL_NODE_PARAMS wide = widened(p);
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

static CUresult change_any(CUgraphNode node, CUgraphNodeParams *p)
{
    CUDA_MEMSET_NODE_PARAMS fill;
    SIM_REQUIRE(p->type == node->type);
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return change_kernel(node, &p->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY: return change_copy(node, &p->memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        memcpy(&fill, &p->memset, sizeof fill);
        return change_fill(node, &fill);
    case CU_GRAPH_NODE_TYPE_HOST:
        SIM_REQUIRE(p->host.fn);
        node->host = (CUDA_HOST_NODE_PARAMS){ p->host.fn, p->host.userData };
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *p)
{
    SIM_REQUIRE(p && is_node(node));
    return change_any(node, p);
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    SIM_REQUIRE(type && is_node(node));
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
    SIM_REQUIRE(count && is_graph(graph));
    struct node_list list = { nodes, *count, 0 };
    for (CUgraphNode node = graph->first; node; node = node->next)
        list_add(&list, node);
    list_end(&list, count);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    SIM_REQUIRE(count && is_graph(graph));
    struct node_list list = { nodes, *count, 0 };
    for (CUgraphNode node = graph->first; node; node = node->next)
        if (node->n_dependencies == 0)
            list_add(&list, node);
    list_end(&list, count);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    SIM_REQUIRE(count && is_graph(graph) && !from == !to);
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
    SIM_REQUIRE(count && is_node(node));
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
    SIM_REQUIRE(count && is_node(node));
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
    SIM_REQUIRE(is_graph(graph) && (count == 0 || (from && to)));
    for (size_t i = 0; i < count; i++)
        SIM_REQUIRE(is_node(from[i]) && is_node(to[i]) && from[i]->graph == graph && to[i]->graph == graph && from[i] != to[i]
                    && !depends_directly(to[i], from[i]));
    for (size_t i = 0; i < count; i++)
        SIM_TRY(sim_graph_depend(to[i], &from[i], 1));
    return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges, size_t count)
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
    SIM_REQUIRE(is_graph(graph) && (count == 0 || (from && to)));
    for (size_t i = 0; i < count; i++)
        SIM_REQUIRE(is_node(from[i]) && is_node(to[i]) && to[i]->graph == graph && depends_directly(to[i], from[i]));
    for (size_t i = 0; i < count; i++)
        undepend(to[i], from[i]);
    return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges, size_t count)
{
    if (!plain_edges(edges, count))
        return CUDA_ERROR_NOT_SUPPORTED;
    return cuGraphRemoveDependencies(graph, from, to, count);
}

CUresult cuGraphDestroyNode(CUgraphNode node)
{
    SIM_REQUIRE(is_node(node));
    if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node->type == CU_GRAPH_NODE_TYPE_MEM_FREE)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (CUgraphNode other = node->graph->first; other; other = other->next)
        undepend(other, node);
    node_discard(node->graph, node);
    return CUDA_SUCCESS;
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
    program->n_kernels += item.kind == SIM_WORK_KERNEL;
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

static CUresult append_event(struct builder *builder, CUgraphNode node)
{
    atomic_fetch_add(&node->event->references, 1);
    CUresult result = append(builder, (struct sim_work){ .kind = node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? SIM_WORK_EVENT : SIM_WORK_WAIT,
                                                         .event = { node->event, 0 } });
    if (result != CUDA_SUCCESS)
        sim_event_release(node->event);
    return result;
}

static CUresult append_graph(struct builder *builder, CUgraph graph);

static CUresult append_node(struct builder *builder, CUgraphNode node)
{
    struct sim_work item = { .kind = SIM_WORK_MARK };
    const struct sim_graph_allocation *memory;
    if (node->disabled)
        return append(builder, item);
    switch (node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        item.kind = SIM_WORK_KERNEL;
        SIM_TRY(sim_launch_duration(node->kernel.function, node->kernel.context->device, &node->kernel.launch, &item.duration_ns));
        return append(builder, item);
    case CU_GRAPH_NODE_TYPE_MEMCPY: return append_copy(builder, node);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        item.kind = SIM_WORK_FILL;
        SIM_TRY(sim_fill_resolve(&node->fill, node->context->device, &item.fill, &item.duration_ns));
        return append(builder, item);
    case CU_GRAPH_NODE_TYPE_HOST:
        item.kind = SIM_WORK_HOST;
        item.host.run = node->host.fn;
        item.host.data = node->host.userData;
        return append(builder, item);
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
        memory = allocation_at(node->freed);
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

/* Make the exec play what its clone says now. A launch that is under way keeps the program it began with. */
static CUresult rebuild(CUgraphExec exec)
{
    struct builder builder;
    SIM_TRY(build(exec->graph, &builder));
    pthread_mutex_lock(&graph_lock);
    struct sim_program *before = exec->program;
    exec->program = builder.program;
    exec->peak_bytes = builder.peak_bytes;
    exec->device = builder.device;
    pthread_mutex_unlock(&graph_lock);
    if (before)
        sim_program_release(before);
    return CUDA_SUCCESS;
}

/* ---- instantiating --------------------------------------------------------------------------------------------------- */

static CUresult instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    SIM_REQUIRE_READY();
    SIM_REQUIRE(out && is_graph(graph) && !(flags & ~15ull));
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (graph->n_allocations && graph->n_execs)
        return CUDA_ERROR_NOT_SUPPORTED;    /* a graph that allocates has one address per allocation, so one exec at a time */
    CUgraphExec exec = sim_object_new(SIM_KIND_EXEC, sizeof *exec);
    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->flags = flags;
    exec->graph = clone_graph(graph);
    CUresult result = exec->graph ? rebuild(exec) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        if (exec->graph)
            sim_graph_delete(exec->graph);
        sim_object_delete(exec);
        return result;
    }
    exec->source = graph;
    exec->source_id = graph->id;
    graph->n_execs++;
    *out = exec;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) { return instantiate(out, graph, flags); }

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
    if (is_graph(exec->source) && exec->source->id == exec->source_id)
        exec->source->n_execs--;
    sim_graph_delete(exec->graph);
    sim_program_release(exec->program);
    sim_object_delete(exec);
    return CUDA_SUCCESS;
}

/* ---- changing an exec ------------------------------------------------------------------------------------------------ */

static CUresult exec_node(CUgraphExec exec, CUgraphNode original, CUgraphNode *out)
{
    SIM_REQUIRE(is_exec(exec) && is_node(original));
    *out = counterpart(exec->graph, original);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

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
    CUDA_KERNEL_NODE_PARAMS wide = widened(p);
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

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode original, CUgraphNodeParams *p)
{
    CUgraphNode node;
    SIM_REQUIRE(p);
    SIM_TRY(exec_node(exec, original, &node));
    SIM_TRY(change_any(node, p));
    return rebuild(exec);
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode original, unsigned int enabled)
{
    CUgraphNode node;
    SIM_TRY(exec_node(exec, original, &node));
    SIM_REQUIRE(node->type == CU_GRAPH_NODE_TYPE_KERNEL || node->type == CU_GRAPH_NODE_TYPE_MEMCPY || node->type == CU_GRAPH_NODE_TYPE_MEMSET);
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
    SIM_REQUIRE(is_exec(exec) && is_graph(wanted) && info);
    *info = (CUgraphExecUpdateResultInfo){ .result = CU_GRAPH_EXEC_UPDATE_SUCCESS };
    info->result = compare(exec->graph, wanted, &info->errorNode);
    if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    CUgraph clone = clone_graph(wanted);
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

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) { return update(exec, graph, info); }

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

/* Under graph_lock: this allocation comes to life, or ends. */
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

/* What a launch does to graph memory, reckoned when it is submitted. graph_lock is held. */
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

/* A free node may end what another graph allocated. graph_lock is held. */
static void account_frees(CUgraph graph)
{
    for (CUgraphNode node = graph->first; node; node = node->next) {
        struct sim_graph_allocation *memory = node->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? allocation_at(node->freed) : NULL;
        if (memory)
            set_live(memory, false);
    }
}

CUresult sim_graph_free_allocation(CUdeviceptr address)
{
    pthread_mutex_lock(&graph_lock);
    struct sim_graph_allocation *memory = allocation_at(address);
    bool live = memory && memory->live;
    if (live) {
        set_live(memory, false);
        memory->references++;
        allocation_release(memory);     /* the addresses end with it when its graph is gone */
    }
    pthread_mutex_unlock(&graph_lock);
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

CUresult cuGraphUpload(CUgraphExec exec, CUstream s) { return upload(exec, s); }
CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream s) { return upload(exec, sim_own(s)); }

static CUresult launch(CUgraphExec exec, CUstream handle)
{
    CUstream stream;
    SIM_TRY(sim_stream_of(handle, &stream));
    SIM_REQUIRE(is_exec(exec));
    if (sim_capturing(stream))
        return sim_capture_graph(stream, exec->graph);
    pthread_mutex_lock(&graph_lock);
    CUresult result = account_launch(exec);
    struct sim_program *program = exec->program;
    if (result == CUDA_SUCCESS) {
        account_frees(exec->graph);
        atomic_fetch_add(&program->references, 1);
    }
    pthread_mutex_unlock(&graph_lock);
    if (result != CUDA_SUCCESS)
        return result;
    if (program->n_items == 0) {
        sim_program_release(program);
        return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_MARK });
    }
    return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_GRAPH, .program = program });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream s) { return launch(exec, s); }
CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream s) { return launch(exec, sim_own(s)); }
