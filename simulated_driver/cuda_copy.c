/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_copy.c - copies and fills. Every form is one CUDA_MEMCPY3D or one CUDA_MEMSET_NODE_PARAMS, checked when it is called and carried out
 * when the stream gets there; bytes really move.
 *
 * A copy takes as long as the link between the two places would: PCIe to the host, NVLink or PCIe to a peer, memory bandwidth on one
 * device. With pageable host memory on one side a call returns when the copy is done, with page-locked memory at once, as on the real
 * driver.
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/cuda_internal.h"

/* ---- how fast -------------------------------------------------------------------------------------------------------- */

/* Bytes per nanosecond of PCIe, after protocol overhead; a generation doubles, generation 3 moves 0.8 per lane. */
static uint64_t pcie_rate(const struct sim_gpu *gpu)
{
	uint32_t generation = gpu->pcie_generation < 3 ? 3 : gpu->pcie_generation;
	uint64_t rate = (gpu->pcie_width * 8 << (generation - 3)) / 10;
	return rate ? rate : 1;
}

static uint64_t copy_rate(const struct sim_device *from, const struct sim_device *to)
{
	if (!from && !to)
		return 10;
	if (!from || !to)
		return pcie_rate(from ? from->hardware : to->hardware);
	if (from == to) {   /* each byte is read and written; two transfers per clock */
		uint64_t rate = (uint64_t)from->hardware->memory_bus_bits / 8 * from->hardware->memory_clock_mhz / 1000;
		return rate ? rate : 1;
	}
	uint64_t links = sim_topology_nvlinks_between(&sim_cuda.state->topology, from->hardware, to->hardware);
	uint64_t rate = links * from->hardware->nvlink_mbps / 1000;
	return rate ? rate : pcie_rate(from->hardware);
}

/* ---- one side of a copy ---------------------------------------------------------------------------------------------- */

struct side {
	CUmemorytype type;
	const void *host;
	CUdeviceptr device;
	CUarray array;
	size_t x, y, z, pitch, height;
};

struct place {
	uint8_t *bytes;
	uint64_t pitch, plane;
	const struct sim_device *device;    /* NULL: host */
	bool pageable;
};

/* A linear range on either side, recognised by its address: unified addressing. */
static CUresult locate(uint64_t address, uint64_t bytes, bool must_be_known, const struct sim_device *accessor, struct place *place)
{
	struct sim_host_range host;
	place->device = sim_memory_device_of(address);
	if (sim_memory_is_ours(address)) {
		place->bytes = sim_memory_bytes(address, bytes, accessor);
		return place->bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	}
	place->pageable = !sim_host_find((const void *)(uintptr_t)address, &host);
	if (address == 0 || (place->pageable && must_be_known))
		return CUDA_ERROR_INVALID_VALUE;
	place->bytes = (uint8_t *)(uintptr_t)address;
	return CUDA_SUCCESS;
}

static CUresult locate_linear(const struct side *side, const CUDA_MEMCPY3D *copy, const struct sim_device *accessor, struct place *place)
{
	uint64_t row = side->x + copy->WidthInBytes, pitch = side->pitch ? side->pitch : row;
	uint64_t rows = side->height ? side->height : side->y + copy->Height;
	SIM_REQUIRE(pitch >= row && (copy->Depth == 1 || rows >= side->y + copy->Height));
	uint64_t start = (side->z * rows + side->y) * pitch + side->x;
	uint64_t bytes = ((copy->Depth - 1) * rows + copy->Height - 1) * pitch + copy->WidthInBytes;
	bool is_host = side->type == CU_MEMORYTYPE_HOST;
	uint64_t base = is_host ? (uint64_t)(uintptr_t)side->host : side->device;
	SIM_REQUIRE(base);
	SIM_TRY(locate(base + start, bytes, side->type == CU_MEMORYTYPE_DEVICE, accessor, place));
	place->pitch = pitch;
	place->plane = rows * pitch;
	return CUDA_SUCCESS;
}

static CUresult locate_array(const struct side *side, const CUDA_MEMCPY3D *copy, struct place *place)
{
	CUarray array = side->array;
	if (!sim_is(array, SIM_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	SIM_REQUIRE(side->x + copy->WidthInBytes <= array->pitch && side->y + copy->Height <= array->rows &&
		    side->z + copy->Depth <= array->planes);
	place->pitch = array->pitch;
	place->plane = array->pitch * array->rows;
	place->device = array->context->device;
	uint64_t start = side->z * place->plane + side->y * place->pitch + side->x;
	place->bytes = sim_memory_bytes(array->memory, array->bytes, place->device);
	if (place->bytes)
		place->bytes += start;
	return place->bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult locate_side(const struct side *side, const CUDA_MEMCPY3D *copy, const struct sim_device *accessor, struct place *place)
{
	switch (side->type) {
	case CU_MEMORYTYPE_HOST:
	case CU_MEMORYTYPE_DEVICE:
	case CU_MEMORYTYPE_UNIFIED: return locate_linear(side, copy, accessor, place);
	case CU_MEMORYTYPE_ARRAY: return locate_array(side, copy, place);
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult resolve(const CUDA_MEMCPY3D *copy, const struct sim_device *device, struct sim_copy_3d *out, uint64_t *duration_ns,
			bool *pageable)
{
	struct side from = { copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcArray, copy->srcXInBytes,
			     copy->srcY,          copy->srcZ,    copy->srcPitch,  copy->srcHeight };
	struct side to = { copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstArray, copy->dstXInBytes,
			   copy->dstY,          copy->dstZ,    copy->dstPitch,  copy->dstHeight };
	struct place source = { 0 }, destination = { 0 };
	SIM_REQUIRE(copy->srcLOD == 0 && copy->dstLOD == 0);
	SIM_TRY(locate_side(&from, copy, device, &source));
	SIM_TRY(locate_side(&to, copy, device, &destination));
	*out = (struct sim_copy_3d){ .from = source.bytes,
				     .to = destination.bytes,
				     .from_pitch = source.pitch,
				     .from_plane = source.plane,
				     .to_pitch = destination.pitch,
				     .to_plane = destination.plane,
				     .width = copy->WidthInBytes,
				     .height = copy->Height,
				     .depth = copy->Depth };
	*duration_ns = copy->WidthInBytes * copy->Height * copy->Depth / copy_rate(source.device, destination.device);
	*pageable = source.pageable || destination.pageable;
	return CUDA_SUCCESS;
}

CUresult sim_copy_resolve(const CUDA_MEMCPY3D *copy, const struct sim_device *device, struct sim_copy_3d *out, uint64_t *duration_ns)
{
	bool pageable;
	return resolve(copy, device, out, duration_ns, &pageable);
}

/* ---- submitting ------------------------------------------------------------------------------------------------------ */

static CUresult submit(CUstream stream, const struct sim_copy_3d *copy, uint64_t duration_ns)
{
	if (copy->height == 1 && copy->depth == 1)
		return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_COPY,
								     .duration_ns = duration_ns,
								     .copy = { copy->from, copy->to, copy->width } });
	struct sim_copy_3d *owned = malloc(sizeof *owned);
	if (!owned)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*owned = *copy;
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_COPY_3D, .duration_ns = duration_ns, .copy_3d = owned });
}

static bool nothing_to_copy(const CUDA_MEMCPY3D *copy)
{
	return copy->WidthInBytes == 0 || copy->Height == 0 || copy->Depth == 0;
}

static CUresult copy_on(CUstream handle, const CUDA_MEMCPY3D *copy, bool wait)
{
	CUstream stream;
	struct sim_copy_3d resolved;
	uint64_t duration_ns;
	bool pageable;
	SIM_TRY(sim_stream_of(handle, &stream));
	if (wait)
		SIM_TRY(sim_capture_unsafe_call());
	if (nothing_to_copy(copy))
		return CUDA_SUCCESS;
	if (sim_capturing(stream))
		return sim_capture_copy(stream, copy);
	SIM_TRY(resolve(copy, stream->context->device, &resolved, &duration_ns, &pageable));
	SIM_TRY(submit(stream, &resolved, duration_ns));
	if (wait || pageable) {
		sim_engine_wait_stream(stream);
		return sim_context_check(stream->context);
	}
	return CUDA_SUCCESS;
}

static CUDA_MEMCPY3D linear(CUmemorytype to_type, uint64_t to, CUmemorytype from_type, uint64_t from, size_t bytes)
{
	CUDA_MEMCPY3D copy = { .srcMemoryType = from_type, .dstMemoryType = to_type, .WidthInBytes = bytes, .Height = 1, .Depth = 1 };
	if (from_type == CU_MEMORYTYPE_HOST)
		copy.srcHost = (const void *)(uintptr_t)from;
	else
		copy.srcDevice = from;
	if (to_type == CU_MEMORYTYPE_HOST)
		copy.dstHost = (void *)(uintptr_t)to;
	else
		copy.dstDevice = to;
	return copy;
}

static CUresult copy_linear(CUstream stream, bool wait, CUmemorytype to_type, uint64_t to, CUmemorytype from_type, uint64_t from,
			    size_t bytes)
{
	CUDA_MEMCPY3D copy = linear(to_type, to, from_type, from, bytes);
	return copy_on(stream, &copy, wait);
}

#define HOST CU_MEMORYTYPE_HOST
#define DEVICE CU_MEMORYTYPE_DEVICE
#define UNIFIED CU_MEMORYTYPE_UNIFIED
#define ADDRESS(pointer) ((uint64_t)(uintptr_t)(pointer))

static CUresult copy_any(CUstream s, bool wait, CUdeviceptr to, CUdeviceptr from, size_t n)
{
	return copy_linear(s, wait, UNIFIED, to, UNIFIED, from, n);
}
static CUresult copy_in(CUstream s, bool wait, CUdeviceptr to, const void *from, size_t n)
{
	return copy_linear(s, wait, DEVICE, to, HOST, ADDRESS(from), n);
}
static CUresult copy_out(CUstream s, bool wait, void *to, CUdeviceptr from, size_t n)
{
	return copy_linear(s, wait, HOST, ADDRESS(to), DEVICE, from, n);
}
static CUresult copy_within(CUstream s, bool wait, CUdeviceptr to, CUdeviceptr from, size_t n)
{
	return copy_linear(s, wait, DEVICE, to, DEVICE, from, n);
}

/* clang-format off */
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy_any(NULL, true, to, from, n); }
CUresult cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy_any(CU_STREAM_PER_THREAD, true, to, from, n); }
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return copy_any(s, false, to, from, n); }
CUresult cuMemcpyAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return copy_any(sim_own(s), false, to, from, n); }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) { return copy_in(NULL, true, to, from, n); }
CUresult cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t n) { return copy_in(CU_STREAM_PER_THREAD, true, to, from, n); }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s) { return copy_in(s, false, to, from, n); }
CUresult cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr to, const void *from, size_t n, CUstream s)
{
	return copy_in(sim_own(s), false, to, from, n);
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) { return copy_out(NULL, true, to, from, n); }
CUresult cuMemcpyDtoH_v2_ptds(void *to, CUdeviceptr from, size_t n) { return copy_out(CU_STREAM_PER_THREAD, true, to, from, n); }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream s) { return copy_out(s, false, to, from, n); }
CUresult cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t n, CUstream s) { return copy_out(sim_own(s), false, to, from, n); }
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy_within(NULL, true, to, from, n); }
CUresult cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy_within(CU_STREAM_PER_THREAD, true, to, from, n); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { return copy_within(s, false, to, from, n); }
CUresult cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s)
{
	return copy_within(sim_own(s), false, to, from, n);
}
/* clang-format on */

/* ---- batches --------------------------------------------------------------------------------------------------------- */

/* Which copies each set of attributes is for: from its index to the next one's. */
static bool valid_attributes(const CUmemcpyAttributes *attributes, const size_t *first, size_t n_attributes, size_t count)
{
	if (!attributes || !first || n_attributes == 0 || n_attributes > count || first[0] != 0)
		return false;
	for (size_t i = 0; i < n_attributes; i++) {
		bool known = attributes[i].srcAccessOrder >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
			     attributes[i].srcAccessOrder <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
		if (!known || first[i] >= count || (i && first[i] <= first[i - 1]))
			return false;
	}
	return true;
}

/* A source that is only there during the call has been read when it returns; the other orders allow what stream order does. */
static CUresult copy_batch(CUstream handle, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes, size_t count,
			   const CUmemcpyAttributes *attributes, const size_t *first, size_t n_attributes, size_t *failed)
{
	CUstream stream;
	*failed = SIZE_MAX;     /* of no copy in particular */
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(to && from && bytes && count && !stream->is_legacy && valid_attributes(attributes, first, n_attributes, count));
	bool ephemeral = false;
	for (size_t i = 0; i < n_attributes; i++)
		ephemeral |= attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
	for (size_t i = 0; i < count; i++) {
		CUresult result = copy_any(handle, false, to[i], from[i], bytes[i]);
		if (result != CUDA_SUCCESS) {
			*failed = i;
			return result;
		}
	}
	if (ephemeral && !sim_capturing(stream))
		sim_engine_wait_stream(stream);
	return CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes,
			       size_t *first, size_t n_attributes, CUstream s)
{
	size_t failed;
	return copy_batch(s, to, from, bytes, count, attributes, first, n_attributes, &failed);
}
CUresult cuMemcpyBatchAsync_v2_ptsz(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes,
				    size_t *first, size_t n_attributes, CUstream s)
{
	size_t failed;
	return copy_batch(sim_own(s), to, from, bytes, count, attributes, first, n_attributes, &failed);
}
CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes, size_t *first,
			    size_t n_attributes, size_t *failed, CUstream s)
{
	SIM_REQUIRE(failed);
	return copy_batch(s, to, from, bytes, count, attributes, first, n_attributes, failed);
}
CUresult cuMemcpyBatchAsync_ptsz(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes,
				 size_t *first, size_t n_attributes, size_t *failed, CUstream s)
{
	SIM_REQUIRE(failed);
	return copy_batch(sim_own(s), to, from, bytes, count, attributes, first, n_attributes, failed);
}

static CUresult copy_with(CUstream s, CUdeviceptr to, CUdeviceptr from, size_t bytes, const CUmemcpyAttributes *attributes)
{
	size_t first = 0, failed;
	return copy_batch(s, &to, &from, &bytes, 1, attributes, &first, 1, &failed);
}

CUresult cuMemcpyWithAttributesAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpyAttributes *attributes, CUstream s)
{
	return copy_with(s, to, from, bytes, attributes);
}
CUresult cuMemcpyWithAttributesAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpyAttributes *attributes, CUstream s)
{
	return copy_with(sim_own(s), to, from, bytes, attributes);
}

/* Between devices: the addresses identify them. */
static CUresult copy_peer(CUstream s, bool wait, CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n)
{
	SIM_REQUIRE_READY();
	if (!sim_is(to_context, SIM_KIND_CONTEXT) || !sim_is(from_context, SIM_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	return copy_within(s, wait, to, from, n);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n)
{
	return copy_peer(NULL, true, to, tc, from, fc, n);
}
CUresult cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n)
{
	return copy_peer(CU_STREAM_PER_THREAD, true, to, tc, from, fc, n);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n, CUstream s)
{
	return copy_peer(s, false, to, tc, from, fc, n);
}
CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n, CUstream s)
{
	return copy_peer(sim_own(s), false, to, tc, from, fc, n);
}

/* ---- arrays, one row of bytes ---------------------------------------------------------------------------------------- */

static CUDA_MEMCPY3D row(size_t bytes)
{
	return (CUDA_MEMCPY3D){ .WidthInBytes = bytes, .Height = 1, .Depth = 1 };
}

static void from_array(CUDA_MEMCPY3D *copy, CUarray array, size_t offset)
{
	copy->srcMemoryType = CU_MEMORYTYPE_ARRAY, copy->srcArray = array, copy->srcXInBytes = offset;
}

static void to_array(CUDA_MEMCPY3D *copy, CUarray array, size_t offset)
{
	copy->dstMemoryType = CU_MEMORYTYPE_ARRAY, copy->dstArray = array, copy->dstXInBytes = offset;
}

static CUresult array_from_device(CUstream s, CUarray to, size_t offset, CUdeviceptr from, size_t n)
{
	CUDA_MEMCPY3D copy = row(n);
	to_array(&copy, to, offset);
	copy.srcMemoryType = DEVICE, copy.srcDevice = from;
	return copy_on(s, &copy, true);
}

static CUresult array_to_device(CUstream s, CUdeviceptr to, CUarray from, size_t offset, size_t n)
{
	CUDA_MEMCPY3D copy = row(n);
	from_array(&copy, from, offset);
	copy.dstMemoryType = DEVICE, copy.dstDevice = to;
	return copy_on(s, &copy, true);
}

static CUresult array_from_host(CUstream s, bool wait, CUarray to, size_t offset, const void *from, size_t n)
{
	CUDA_MEMCPY3D copy = row(n);
	to_array(&copy, to, offset);
	copy.srcMemoryType = HOST, copy.srcHost = from;
	return copy_on(s, &copy, wait);
}

static CUresult array_to_host(CUstream s, bool wait, void *to, CUarray from, size_t offset, size_t n)
{
	CUDA_MEMCPY3D copy = row(n);
	from_array(&copy, from, offset);
	copy.dstMemoryType = HOST, copy.dstHost = to;
	return copy_on(s, &copy, wait);
}

static CUresult array_to_array(CUstream s, CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t n)
{
	CUDA_MEMCPY3D copy = row(n);
	from_array(&copy, from, from_offset);
	to_array(&copy, to, to_offset);
	return copy_on(s, &copy, true);
}

/* clang-format off */
CUresult cuMemcpyDtoA_v2(CUarray to, size_t at, CUdeviceptr from, size_t n) { return array_from_device(NULL, to, at, from, n); }
CUresult cuMemcpyDtoA_v2_ptds(CUarray to, size_t at, CUdeviceptr from, size_t n)
{
	return array_from_device(CU_STREAM_PER_THREAD, to, at, from, n);
}
CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t at, size_t n) { return array_to_device(NULL, to, from, at, n); }
CUresult cuMemcpyAtoD_v2_ptds(CUdeviceptr to, CUarray from, size_t at, size_t n)
{
	return array_to_device(CU_STREAM_PER_THREAD, to, from, at, n);
}
CUresult cuMemcpyHtoA_v2(CUarray to, size_t at, const void *from, size_t n) { return array_from_host(NULL, true, to, at, from, n); }
CUresult cuMemcpyHtoA_v2_ptds(CUarray to, size_t at, const void *from, size_t n)
{
	return array_from_host(CU_STREAM_PER_THREAD, true, to, at, from, n);
}
CUresult cuMemcpyAtoH_v2(void *to, CUarray from, size_t at, size_t n) { return array_to_host(NULL, true, to, from, at, n); }
CUresult cuMemcpyAtoH_v2_ptds(void *to, CUarray from, size_t at, size_t n)
{
	return array_to_host(CU_STREAM_PER_THREAD, true, to, from, at, n);
}
CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t at, const void *from, size_t n, CUstream s)
{
	return array_from_host(s, false, to, at, from, n);
}
/* clang-format on */
CUresult cuMemcpyHtoAAsync_v2_ptsz(CUarray to, size_t at, const void *from, size_t n, CUstream s)
{
	return array_from_host(sim_own(s), false, to, at, from, n);
}
CUresult cuMemcpyAtoHAsync_v2(void *to, CUarray from, size_t at, size_t n, CUstream s)
{
	return array_to_host(s, false, to, from, at, n);
}
CUresult cuMemcpyAtoHAsync_v2_ptsz(void *to, CUarray from, size_t at, size_t n, CUstream s)
{
	return array_to_host(sim_own(s), false, to, from, at, n);
}
CUresult cuMemcpyAtoA_v2(CUarray to, size_t ta, CUarray from, size_t fa, size_t n)
{
	return array_to_array(NULL, to, ta, from, fa, n);
}
CUresult cuMemcpyAtoA_v2_ptds(CUarray to, size_t ta, CUarray from, size_t fa, size_t n)
{
	return array_to_array(CU_STREAM_PER_THREAD, to, ta, from, fa, n);
}

/* ---- rectangles and boxes -------------------------------------------------------------------------------------------- */

static CUresult copy_2d(CUstream s, bool wait, const CUDA_MEMCPY2D *given)
{
	SIM_REQUIRE(given);
	CUDA_MEMCPY3D copy = {
		.srcXInBytes = given->srcXInBytes,
		.srcY = given->srcY,
		.srcMemoryType = given->srcMemoryType,
		.srcHost = given->srcHost,
		.srcDevice = given->srcDevice,
		.srcArray = given->srcArray,
		.srcPitch = given->srcPitch,
		.dstXInBytes = given->dstXInBytes,
		.dstY = given->dstY,
		.dstMemoryType = given->dstMemoryType,
		.dstHost = given->dstHost,
		.dstDevice = given->dstDevice,
		.dstArray = given->dstArray,
		.dstPitch = given->dstPitch,
		.WidthInBytes = given->WidthInBytes,
		.Height = given->Height,
		.Depth = 1,
	};
	return copy_on(s, &copy, wait);
}

static CUresult copy_3d(CUstream s, bool wait, const CUDA_MEMCPY3D *given)
{
	SIM_REQUIRE(given);
	return copy_on(s, given, wait);
}

static CUresult copy_3d_peer(CUstream s, bool wait, const CUDA_MEMCPY3D_PEER *given)
{
	SIM_REQUIRE(given);
	CUDA_MEMCPY3D copy = {
		.srcXInBytes = given->srcXInBytes,
		.srcY = given->srcY,
		.srcZ = given->srcZ,
		.srcLOD = given->srcLOD,
		.srcMemoryType = given->srcMemoryType,
		.srcHost = given->srcHost,
		.srcDevice = given->srcDevice,
		.srcArray = given->srcArray,
		.srcPitch = given->srcPitch,
		.srcHeight = given->srcHeight,
		.dstXInBytes = given->dstXInBytes,
		.dstY = given->dstY,
		.dstZ = given->dstZ,
		.dstLOD = given->dstLOD,
		.dstMemoryType = given->dstMemoryType,
		.dstHost = given->dstHost,
		.dstDevice = given->dstDevice,
		.dstArray = given->dstArray,
		.dstPitch = given->dstPitch,
		.dstHeight = given->dstHeight,
		.WidthInBytes = given->WidthInBytes,
		.Height = given->Height,
		.Depth = given->Depth,
	};
	return copy_on(s, &copy, wait);
}

/* clang-format off */
CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *copy) { return copy_2d(NULL, true, copy); }
CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *copy) { return copy_2d(CU_STREAM_PER_THREAD, true, copy); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *copy) { return copy_2d(NULL, true, copy); }
CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *copy) { return copy_2d(CU_STREAM_PER_THREAD, true, copy); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream s) { return copy_2d(s, false, copy); }
CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *copy, CUstream s) { return copy_2d(sim_own(s), false, copy); }
CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *copy) { return copy_3d(NULL, true, copy); }
CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *copy) { return copy_3d(CU_STREAM_PER_THREAD, true, copy); }
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, CUstream s) { return copy_3d(s, false, copy); }
CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *copy, CUstream s) { return copy_3d(sim_own(s), false, copy); }
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *copy) { return copy_3d_peer(NULL, true, copy); }
CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *copy) { return copy_3d_peer(CU_STREAM_PER_THREAD, true, copy); }
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *copy, CUstream s) { return copy_3d_peer(s, false, copy); }
CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *copy, CUstream s) { return copy_3d_peer(sim_own(s), false, copy); }
/* clang-format on */

/* ---- fills ----------------------------------------------------------------------------------------------------------- */

CUresult sim_fill_resolve(const CUDA_MEMSET_NODE_PARAMS *fill, const struct sim_device *device, struct sim_fill *out, uint64_t *duration_ns)
{
	uint64_t row_bytes = (uint64_t)fill->width * fill->elementSize, pitch = fill->height > 1 ? fill->pitch : row_bytes;
	struct place place = { 0 };
	SIM_REQUIRE(fill->elementSize == 1 || fill->elementSize == 2 || fill->elementSize == 4);
	SIM_REQUIRE(fill->dst % fill->elementSize == 0 && pitch % fill->elementSize == 0 && pitch >= row_bytes && fill->width &&
		    fill->height);
	SIM_TRY(locate(fill->dst, (fill->height - 1) * pitch + row_bytes, true, device, &place));
	*out = (struct sim_fill){ .bytes = place.bytes,
				  .pitch = pitch,
				  .width = fill->width,
				  .height = fill->height,
				  .value = fill->value,
				  .element_bytes = fill->elementSize };
	*duration_ns = row_bytes * fill->height / copy_rate(place.device, place.device);
	return CUDA_SUCCESS;
}

uint64_t sim_fill_span(const CUDA_MEMSET_NODE_PARAMS *fill)
{
	return (fill->height > 1 ? (fill->height - 1) * fill->pitch : 0) + fill->width * fill->elementSize;
}

/* Asynchronous to the host in every form. */
static CUresult fill_on(CUstream handle, CUdeviceptr to, size_t pitch, unsigned value, unsigned element_bytes, size_t width, size_t height)
{
	CUstream stream;
	CUDA_MEMSET_NODE_PARAMS fill = {
		.dst = to, .pitch = pitch, .value = value, .elementSize = element_bytes, .width = width, .height = height
	};
	struct sim_work work = { .kind = SIM_WORK_FILL };
	SIM_TRY(sim_stream_of(handle, &stream));
	if (width == 0 || height == 0)
		return CUDA_SUCCESS;
	if (sim_capturing(stream))
		return sim_capture_fill(stream, &fill);
	SIM_TRY(sim_fill_resolve(&fill, stream->context->device, &work.fill, &work.duration_ns));
	sim_managed_touch(to, sim_fill_span(&fill), stream->context->device);
	return sim_engine_submit(stream, &work);
}

#define FILL_FORMS(bits, type)                                                                                                      \
	CUresult cuMemsetD##bits##_v2(CUdeviceptr to, type value, size_t n) { return fill_on(NULL, to, 0, value, bits / 8, n, 1); } \
	CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr to, type value, size_t n)                                                    \
	{                                                                                                                           \
		return fill_on(CU_STREAM_PER_THREAD, to, 0, value, bits / 8, n, 1);                                                 \
	}                                                                                                                           \
	CUresult cuMemsetD##bits##Async(CUdeviceptr to, type value, size_t n, CUstream s)                                           \
	{                                                                                                                           \
		return fill_on(s, to, 0, value, bits / 8, n, 1);                                                                    \
	}                                                                                                                           \
	CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr to, type value, size_t n, CUstream s)                                      \
	{                                                                                                                           \
		return fill_on(sim_own(s), to, 0, value, bits / 8, n, 1);                                                           \
	}                                                                                                                           \
	CUresult cuMemsetD2D##bits##_v2(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height)                      \
	{                                                                                                                           \
		return fill_on(NULL, to, pitch, value, bits / 8, width, height);                                                    \
	}                                                                                                                           \
	CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height)                 \
	{                                                                                                                           \
		return fill_on(CU_STREAM_PER_THREAD, to, pitch, value, bits / 8, width, height);                                    \
	}                                                                                                                           \
	CUresult cuMemsetD2D##bits##Async(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream s)        \
	{                                                                                                                           \
		return fill_on(s, to, pitch, value, bits / 8, width, height);                                                       \
	}                                                                                                                           \
	CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream s)   \
	{                                                                                                                           \
		return fill_on(sim_own(s), to, pitch, value, bits / 8, width, height);                                              \
	}

FILL_FORMS(8, unsigned char)
FILL_FORMS(16, unsigned short)
FILL_FORMS(32, unsigned int)
