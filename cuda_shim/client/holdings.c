/* SPDX-License-Identifier: Apache-2.0 */
#include "client/holdings.h"

#include <string.h>

#define MIB ((size_t)1 << 20)
#define PITCH_WIDTH 4       /* thin rows: the driver pads each to its pitch */
#define PITCH_GRANULE 512   /* what one thin row costs */
#define ARRAY_WIDTH 65536   /* elements of one float row */

CUdevice holdings_device;

const char kind_names[] = "alloc | pitch | managed | async | pool | vmm | vmm-release | array | mipmap | graph | ctx";

static CUresult take_linear(struct holding *h, size_t bytes)
{
	return cu.cuMemAlloc_v2(&h->a, bytes);
}

static CUresult free_linear(const struct holding *h)
{
	return cu.cuMemFree_v2(h->a);
}

static CUresult take_pitch(struct holding *h, size_t bytes)
{
	size_t pitch;
	return cu.cuMemAllocPitch_v2(&h->a, &pitch, PITCH_WIDTH, bytes / PITCH_GRANULE, 4);
}

static CUresult take_managed(struct holding *h, size_t bytes)
{
	return cu.cuMemAllocManaged(&h->a, bytes, CU_MEM_ATTACH_GLOBAL);
}

static CUresult take_async(struct holding *h, size_t bytes)
{
	CUresult result = cu.cuMemAllocAsync(&h->a, bytes, NULL);
	return result == CUDA_SUCCESS ? cu.cuStreamSynchronize(NULL) : result;
}

static CUresult free_async(const struct holding *h)
{
	CUresult result = cu.cuMemFreeAsync(h->a, NULL);
	return result == CUDA_SUCCESS ? cu.cuStreamSynchronize(NULL) : result;
}

static CUresult take_pool(struct holding *h, size_t bytes)
{
	static CUmemoryPool pool;
	if (!pool) {
		CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
					 .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = holdings_device } };
		CUresult result = cu.cuMemPoolCreate(&pool, &props);
		if (result != CUDA_SUCCESS)
			return result;
	}
	CUresult result = cu.cuMemAllocFromPoolAsync(&h->a, bytes, pool, NULL);
	return result == CUDA_SUCCESS ? cu.cuStreamSynchronize(NULL) : result;
}

static CUresult create_physical(CUmemGenericAllocationHandle *handle, size_t bytes)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = holdings_device } };
	return cu.cuMemCreate(handle, bytes, &prop, 0);
}

static CUresult take_vmm(struct holding *h, size_t bytes)
{
	return create_physical(&h->a, bytes);
}

static CUresult free_vmm(const struct holding *h)
{
	return cu.cuMemRelease(h->a);
}

/* The handle is released while mapped, as NCCL and vLLM's sleep mode do: the bytes stay until the range is unmapped. */
static CUresult take_vmm_released(struct holding *h, size_t bytes)
{
	CUmemGenericAllocationHandle handle;
	CUresult result = create_physical(&handle, bytes);
	if (result != CUDA_SUCCESS)
		return result;
	result = cu.cuMemAddressReserve(&h->a, bytes, 0, 0, 0);
	if (result == CUDA_SUCCESS)
		result = cu.cuMemMap(h->a, bytes, 0, handle, 0);
	CUresult released = cu.cuMemRelease(handle);
	return result == CUDA_SUCCESS ? released : result;
}

static CUresult free_vmm_released(const struct holding *h)
{
	return cu.cuMemUnmap(h->a, h->bytes);
}

static CUDA_ARRAY3D_DESCRIPTOR float_rows(size_t bytes)
{
	size_t row_bytes = ARRAY_WIDTH * sizeof(float);
	return (CUDA_ARRAY3D_DESCRIPTOR){
		.Width = ARRAY_WIDTH, .Height = bytes < row_bytes ? 1 : bytes / row_bytes, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1
	};
}

static CUresult take_array(struct holding *h, size_t bytes)
{
	CUDA_ARRAY3D_DESCRIPTOR descriptor = float_rows(bytes);
	return cu.cuArray3DCreate_v2((CUarray *)&h->a, &descriptor);
}

static CUresult free_array(const struct holding *h)
{
	return cu.cuArrayDestroy((CUarray)h->a);
}

static CUresult take_mipmap(struct holding *h, size_t bytes)
{
	CUDA_ARRAY3D_DESCRIPTOR descriptor = float_rows(bytes);
	return cu.cuMipmappedArrayCreate((CUmipmappedArray *)&h->a, &descriptor, 1);
}

static CUresult free_mipmap(const struct holding *h)
{
	return cu.cuMipmappedArrayDestroy((CUmipmappedArray)h->a);
}

/* A graph with one node, which allocates and never frees: the memory stays after the launch. */
static CUresult take_graph(struct holding *h, size_t bytes)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = { .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
							     .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = holdings_device } },
					      .bytesize = bytes };
	CUgraph graph;
	CUgraphNode node;
	CUgraphExec exec;
	CUresult result = cu.cuGraphCreate(&graph, 0);
	if (result == CUDA_SUCCESS)
		result = cu.cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params);
	if (result == CUDA_SUCCESS)
		result = cu.cuGraphInstantiateWithFlags(&exec, graph, 0);
	if (result == CUDA_SUCCESS)
		result = cu.cuGraphLaunch(exec, NULL);
	if (result == CUDA_SUCCESS)
		result = cu.cuStreamSynchronize(NULL);
	h->a = params.dptr;
	return result;
}

static CUresult take_context(struct holding *h, size_t bytes)
{
	(void)bytes;
	CUresult result = cu.cuCtxCreate_v2((CUcontext *)&h->a, 0, holdings_device);
	return result;
}

static CUresult free_context(const struct holding *h)
{
	return cu.cuCtxDestroy_v2((CUcontext)h->a);
}

static const struct kind kinds[] = {
	{ "alloc", 1, take_linear, free_linear },
	{ "pitch", PITCH_GRANULE, take_pitch, free_linear },
	{ "managed", 1, take_managed, free_linear },
	{ "async", 1, take_async, free_async },
	{ "pool", 1, take_pool, free_async },
	{ "vmm", 2 * MIB, take_vmm, free_vmm },
	{ "vmm-release", 2 * MIB, take_vmm_released, free_vmm_released },
	{ "array", ARRAY_WIDTH * sizeof(float), take_array, free_array },
	{ "mipmap", ARRAY_WIDTH * sizeof(float), take_mipmap, free_mipmap },
	{ "graph", 2 * MIB, take_graph, free_async },
	{ "ctx", 1, take_context, free_context },
};

const struct kind *kind_find(const char *name)
{
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		if (strcmp(kinds[i].name, name) == 0)
			return &kinds[i];
	return NULL;
}
