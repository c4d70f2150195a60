/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graph.c - nodes with parameters, and conditional handles.
 *
 * The parameters of a node are the driver's own except for kernels (a host function names them), copies (other structure) and conditional
 * nodes (the driver wants a context). What the driver returns in them is copied back.
 */
#include "simulated_runtime/runtime.h"

#include <string.h>

static cudaError_t set_kernel(CUgraphNodeParams *params, const struct cudaKernelNodeParamsV2 *kernel)
{
	params->kernel.func = NULL;
	RT_TRY(rt_kernel(kernel->func, &params->kernel.kern));
	params->kernel.ctx = NULL;
	return cudaSuccess;
}

static cudaError_t set_copy(CUgraphNodeParams *params, const struct cudaMemcpyNodeParams *node)
{
	const struct cudaMemcpy3DParms *copy = &node->copyParams;
	if ((int)copy->kind < cudaMemcpyHostToHost || copy->kind > cudaMemcpyDefault)
		return cudaErrorInvalidMemcpyDirection;
	params->memcpy.flags = node->flags;
	params->memcpy.reserved = 0;
	RT_TRY(RT_CALL(cuCtxGetCurrent, &params->memcpy.copyCtx));
	params->memcpy.copyParams = (CUDA_MEMCPY3D){
		.srcXInBytes = copy->srcPos.x,
		.srcY = copy->srcPos.y,
		.srcZ = copy->srcPos.z,
		.srcMemoryType = copy->srcArray ? CU_MEMORYTYPE_ARRAY : rt_memory_type((int)copy->kind, true),
		.srcHost = copy->srcPtr.ptr,
		.srcDevice = (CUdeviceptr)(uintptr_t)copy->srcPtr.ptr,
		.srcArray = copy->srcArray,
		.srcPitch = copy->srcPtr.pitch,
		.srcHeight = copy->srcPtr.ysize,
		.dstXInBytes = copy->dstPos.x,
		.dstY = copy->dstPos.y,
		.dstZ = copy->dstPos.z,
		.dstMemoryType = copy->dstArray ? CU_MEMORYTYPE_ARRAY : rt_memory_type((int)copy->kind, false),
		.dstHost = copy->dstPtr.ptr,
		.dstDevice = (CUdeviceptr)(uintptr_t)copy->dstPtr.ptr,
		.dstArray = copy->dstArray,
		.dstPitch = copy->dstPtr.pitch,
		.dstHeight = copy->dstPtr.ysize,
		.WidthInBytes = copy->extent.width,
		.Height = copy->extent.height,
		.Depth = copy->extent.depth,
	};
	return cudaSuccess;
}

/* The driver's parameters of a conditional node; the runtime's have the context since CUDA 13. */
struct driver_conditional {
	CUgraphConditionalHandle handle;
	int type;
	unsigned int size;
	CUgraph *bodies;
	CUcontext ctx;
};

static struct driver_conditional *driver_conditional(CUgraphNodeParams *params)
{
	return (struct driver_conditional *)(void *)((char *)params + offsetof(CUgraphNodeParams, kernel));
}

/* The driver's form of a node's parameters. */
static cudaError_t translate(CUgraphNodeParams *params, const struct cudaGraphNodeParams *node)
{
	memcpy(params, node, sizeof(*params));
	switch (node->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL: return set_kernel(params, &node->kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY: return set_copy(params, &node->memcpy);
	case CU_GRAPH_NODE_TYPE_MEMSET: return RT_CALL(cuCtxGetCurrent, &params->memset.ctx);
	case CU_GRAPH_NODE_TYPE_CONDITIONAL: return RT_CALL(cuCtxGetCurrent, &driver_conditional(params)->ctx);
	default: return cudaSuccess;
	}
}

/* The address of an allocation, and the bodies of a conditional node. */
static void copy_back(struct cudaGraphNodeParams *node, CUgraphNodeParams *params)
{
	if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
		memcpy(node, params, sizeof(*node));
	else if (node->type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
		node->conditional.phGraph_out = driver_conditional(params)->bodies;
}

static cudaError_t add_node(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
			    size_t count, struct cudaGraphNodeParams *wanted)
{
	CUgraphNodeParams params;
	if (!node || !wanted)
		return cudaErrorInvalidValue;
	RT_TRY(rt_context());
	RT_TRY(translate(&params, wanted));
	RT_TRY(RT_CALL(cuGraphAddNode_v2, node, graph, nodes, edges, count, &params));
	copy_back(wanted, &params);
	return cudaSuccess;
}

#if RUNTIME_MAJOR == 12
EXPORT cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, size_t count,
				    struct cudaGraphNodeParams *params)
{
	return rt_return(add_node(node, graph, nodes, NULL, count, params));
}

EXPORT cudaError_t cudaGraphAddNode_v2(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
				       size_t count, struct cudaGraphNodeParams *params)
#else
EXPORT cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, const CUgraphEdgeData *edges,
				    size_t count, struct cudaGraphNodeParams *params)
#endif
{
	return rt_return(add_node(node, graph, nodes, edges, count, params));
}

static cudaError_t create_conditional(CUgraphConditionalHandle *handle, cudaGraph_t graph, unsigned int value, unsigned int flags)
{
	CUcontext context;
	RT_TRY(rt_context());
	RT_TRY(RT_CALL(cuCtxGetCurrent, &context));
	return RT_CALL(cuGraphConditionalHandleCreate, handle, graph, context, value, flags);
}

EXPORT cudaError_t cudaGraphConditionalHandleCreate(CUgraphConditionalHandle *handle, cudaGraph_t graph, unsigned int value,
						    unsigned int flags)
{
	return rt_return(create_conditional(handle, graph, value, flags));
}
