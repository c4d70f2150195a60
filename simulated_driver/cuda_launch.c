/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_launch.c - launching kernels: what is checked, and how long a launch takes.
 *
 * Duration of one launch, alone on the SMs:
 *     aliquot_spin                its first parameter, in microseconds
 *     a kernel with duration_us   that, times (SMs of the whole GPU / SMs of the MIG instance)
 *     any other                   5 microseconds per wave; a wave is as many blocks as fit on all SMs at once by threads and by blocks
 */
#include <string.h>

#include "simulated_driver/cuda_internal.h"

#define WAVE_NS 5000u
#define DEFAULT_SHARED_BYTES 49152u
#define REGISTERS_PER_SM 65536u
#define MOST_PORTABLE_CLUSTER 8u /* blocks of a cluster that every device of compute capability 9.0 and newer takes */
#define MOST_CLUSTER 16u

static uint32_t at_most(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

/* Blocks of this size that one SM holds at a time. */
static uint32_t resident_blocks(const struct sim_device *device, uint32_t threads)
{
	uint32_t warps = (threads + 31) / 32 * 32;
	return at_most(device->threads_per_sm / warps, device->blocks_per_sm);
}

static uint64_t blocks_of(const struct sim_launch *launch)
{
	return (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
}

static CUresult check(const struct sim_launch *launch, CUfunction function, const struct sim_device *device, uint32_t *threads)
{
	uint64_t count = (uint64_t)launch->block[0] * launch->block[1] * launch->block[2];
	SIM_REQUIRE(launch->grid[0] && launch->grid[1] && launch->grid[2] && count);
	SIM_REQUIRE(launch->grid[0] <= 2147483647u && launch->grid[1] <= 65535 && launch->grid[2] <= 65535);
	SIM_REQUIRE(launch->block[0] <= 1024 && launch->block[1] <= 1024 && launch->block[2] <= 64 && count <= 1024);
	uint32_t most_shared = function->max_dynamic_shared_bytes > (int)DEFAULT_SHARED_BYTES ? (uint32_t)function->max_dynamic_shared_bytes
											      : DEFAULT_SHARED_BYTES;
	SIM_REQUIRE(launch->shared_bytes <= most_shared);
	*threads = (uint32_t)count;
	if (launch->cooperative && blocks_of(launch) > (uint64_t)device->sm_count * resident_blocks(device, *threads))
		return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
	return CUDA_SUCCESS;
}

/* The first parameter, from the array of pointers or from the packed buffer, whichever the caller used. */
static CUresult first_parameter(const struct sim_launch *launch, CUfunction function, uint64_t *value)
{
	if (launch->parameters) {
		SIM_REQUIRE(launch->parameters[0]);
		memcpy(value, launch->parameters[0], sizeof *value);
		return CUDA_SUCCESS;
	}
	for (void **extra = launch->extra; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
		if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
			memcpy(value, extra[1], sizeof *value);
			return CUDA_SUCCESS;
		}
	SIM_REQUIRE(function->parameter_bytes >= sizeof *value);
	memcpy(value, function->parameters, sizeof *value);
	return CUDA_SUCCESS;
}

/* Where a parameter lies; NULL when the caller gave none. */
static const void *parameter_at(const struct sim_launch *launch, CUfunction function, uint32_t index)
{
	uint32_t offset = function->kernel->parameters[index].offset;
	if (launch->parameters)
		return launch->parameters[index];
	for (void **extra = launch->extra; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
		if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
			return (const char *)extra[1] + offset;
	return function->parameter_bytes >= offset + sizeof(CUdeviceptr) ? function->parameters + offset : NULL;
}

void sim_launch_touched(CUfunction function, const struct sim_launch *launch, struct sim_touched *touched)
{
	const struct sim_image_kernel *kernel = function->kernel;
	touched->count = 0;
	for (uint32_t i = 0; i < kernel->n_parameters && touched->count < SIM_MAX_TOUCHED; i++) {
		struct sim_range range;
		CUdeviceptr address;
		const void *at = kernel->parameters[i].bytes == sizeof address ? parameter_at(launch, function, i) : NULL;
		if (!at)
			continue;
		memcpy(&address, at, sizeof address);
		if (sim_memory_find(address, &range) && range.managed)
			touched->addresses[touched->count++] = address;
	}
}

CUresult sim_launch_duration(CUfunction function, const struct sim_device *device, const struct sim_launch *launch, uint64_t *duration_ns)
{
	uint32_t threads;
	if (sim_unlikely(!sim_is(function, SIM_KIND_FUNCTION)))
		return CUDA_ERROR_INVALID_HANDLE;
	SIM_TRY(check(launch, function, device, &threads));
	if (function->spins) {
		uint64_t microseconds;
		SIM_TRY(first_parameter(launch, function, &microseconds));
		*duration_ns = microseconds * 1000;
	} else if (function->kernel->duration_ns) {
		uint64_t whole_ns = function->kernel->duration_ns;
		*duration_ns = device->is_mig ? whole_ns * device->hardware->sm_count / device->sm_count : whole_ns;
	} else {
		uint64_t wave = (uint64_t)device->sm_count * resident_blocks(device, threads);
		*duration_ns = (blocks_of(launch) + wave - 1) / wave * WAVE_NS;
	}
	return CUDA_SUCCESS;
}

static CUresult launch_on(CUstream handle, CUfunction function, const struct sim_launch *launch)
{
	CUstream stream;
	uint64_t duration_ns;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_TRY(sim_launch_duration(function, stream->context->device, launch, &duration_ns));
	SIM_TRY(sim_function_prepare(function, stream->context));
	if (sim_capturing(stream))
		return sim_capture_kernel(stream, function, launch);
	if (sim_unlikely(atomic_load_explicit(&sim_managed_made, memory_order_relaxed))) {
		struct sim_touched touched;
		sim_launch_touched(function, launch, &touched);
		sim_touch(&touched, stream->context->device);
	}
	return sim_engine_submit_kernel(stream, duration_ns);
}

#define LAUNCH(gx, gy, gz, bx, by, bz, shared, cooperative, parameters, extra) \
	&(struct sim_launch){ { gx, gy, gz }, { bx, by, bz }, shared, cooperative, parameters, extra }

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
			unsigned int shared, CUstream s, void **parameters, void **extra)
{
	return launch_on(s, f, LAUNCH(gx, gy, gz, bx, by, bz, shared, false, parameters, extra));
}

CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
			     unsigned int bz, unsigned int shared, CUstream s, void **parameters, void **extra)
{
	return launch_on(sim_own(s), f, LAUNCH(gx, gy, gz, bx, by, bz, shared, false, parameters, extra));
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
				   unsigned int bz, unsigned int shared, CUstream s, void **parameters)
{
	return launch_on(s, f, LAUNCH(gx, gy, gz, bx, by, bz, shared, true, parameters, NULL));
}

CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
					unsigned int bz, unsigned int shared, CUstream s, void **parameters)
{
	return launch_on(sim_own(s), f, LAUNCH(gx, gy, gz, bx, by, bz, shared, true, parameters, NULL));
}

/* Blocks per cluster on each axis: as the launch says, else as the function requires; all 0 without clusters. A function's required size
 * allows no other. */
static CUresult cluster_of(const CUlaunchConfig *config, CUfunction f, unsigned cluster[3])
{
	SIM_REQUIRE(config->numAttrs == 0 || config->attrs);
	memcpy(cluster, f->cluster, sizeof f->cluster);
	for (unsigned i = 0; i < config->numAttrs; i++) {
		if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
			continue;
		unsigned asked[3] = { config->attrs[i].value.clusterDim.x, config->attrs[i].value.clusterDim.y,
				      config->attrs[i].value.clusterDim.z };
		if (cluster[0] && memcmp(cluster, asked, sizeof asked) != 0)
			return CUDA_ERROR_INVALID_CLUSTER_SIZE;
		memcpy(cluster, asked, sizeof asked);
	}
	if (!cluster[0] && !cluster[1] && !cluster[2])
		return f->cluster_must_be_set ? CUDA_ERROR_INVALID_CLUSTER_SIZE : CUDA_SUCCESS;
	for (unsigned axis = 0; axis < 3; axis++) /* an axis that is not given counts one */
		cluster[axis] = cluster[axis] ? cluster[axis] : 1;
	return CUDA_SUCCESS;
}

static uint64_t cluster_blocks(const unsigned cluster[3])
{
	return (uint64_t)cluster[0] * cluster[1] * cluster[2];
}

static CUresult check_cluster(const CUlaunchConfig *config, CUfunction f, const struct sim_device *device, const unsigned cluster[3])
{
	uint64_t blocks = cluster_blocks(cluster);
	if (blocks <= 1)
		return CUDA_SUCCESS;
	if (device->hardware->compute_major < 9 || cluster[0] > MOST_CLUSTER || cluster[1] > MOST_CLUSTER || cluster[2] > MOST_CLUSTER ||
	    blocks > (f->non_portable_cluster ? MOST_CLUSTER : MOST_PORTABLE_CLUSTER))
		return CUDA_ERROR_INVALID_CLUSTER_SIZE;
	bool is_whole = config->gridDimX % cluster[0] == 0 && config->gridDimY % cluster[1] == 0 && config->gridDimZ % cluster[2] == 0;
	return is_whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CLUSTER_SIZE;
}

static CUresult launch_cluster(const CUlaunchConfig *config, CUstream handle, CUfunction f)
{
	unsigned cluster[3];
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	if (!sim_is(f, SIM_KIND_FUNCTION))
		return CUDA_ERROR_INVALID_HANDLE;
	SIM_TRY(cluster_of(config, f, cluster));
	return check_cluster(config, f, stream->context->device, cluster);
}

static CUresult launch_ex(const CUlaunchConfig *config, CUstream stream, CUfunction f, void **parameters, void **extra)
{
	bool cooperative = false;
	SIM_TRY(launch_cluster(config, stream, f));
	for (unsigned i = 0; i < config->numAttrs; i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
			cooperative = config->attrs[i].value.cooperative != 0;
	return launch_on(stream, f,
			 LAUNCH(config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
				config->blockDimZ, config->sharedMemBytes, cooperative, parameters, extra));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra)
{
	SIM_REQUIRE(config);
	return launch_ex(config, config->hStream, f, parameters, extra);
}

CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra)
{
	SIM_REQUIRE(config);
	return launch_ex(config, sim_own(config->hStream), f, parameters, extra);
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags)
{
	SIM_REQUIRE(launches && count && !(flags & ~3u));
	for (unsigned i = 0; i < count; i++) {
		const CUDA_LAUNCH_PARAMS *one = &launches[i];
		SIM_TRY(launch_on(one->hStream, one->function,
				  LAUNCH(one->gridDimX, one->gridDimY, one->gridDimZ, one->blockDimX, one->blockDimY, one->blockDimZ,
					 one->sharedMemBytes, true, one->kernelParams, NULL)));
	}
	return CUDA_SUCCESS;
}

/* ---- the launch calls of CUDA 3 and before: shape and parameters are properties of the function ---------------------- */

static CUresult check_function(CUfunction f)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	return sim_is(f, SIM_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetBlockShape(CUfunction f, int x, int y, int z)
{
	SIM_TRY(check_function(f));
	SIM_REQUIRE(x > 0 && y > 0 && z > 0 && (int64_t)x * y * z <= 1024);
	f->block[0] = (unsigned)x, f->block[1] = (unsigned)y, f->block[2] = (unsigned)z;
	return CUDA_SUCCESS;
}

CUresult cuFuncSetSharedSize(CUfunction f, unsigned int bytes)
{
	SIM_TRY(check_function(f));
	f->shared_bytes = bytes;
	return CUDA_SUCCESS;
}

CUresult cuParamSetSize(CUfunction f, unsigned int bytes)
{
	SIM_TRY(check_function(f));
	SIM_REQUIRE(bytes <= 4096);
	f->parameter_bytes = bytes;
	return CUDA_SUCCESS;
}

/* Only the first parameter is ever looked at, so only the buffer's start is kept. */
CUresult cuParamSetv(CUfunction f, int offset, void *value, unsigned int bytes)
{
	SIM_TRY(check_function(f));
	SIM_REQUIRE(offset >= 0 && offset <= 4096 && bytes <= 4096 && value);
	if ((size_t)offset < sizeof f->parameters) {
		size_t room = sizeof f->parameters - (size_t)offset;
		memcpy(f->parameters + offset, value, bytes < room ? bytes : room);
	}
	return CUDA_SUCCESS;
}

CUresult cuParamSeti(CUfunction f, int offset, unsigned int value)
{
	return cuParamSetv(f, offset, &value, sizeof value);
}
CUresult cuParamSetf(CUfunction f, int offset, float value)
{
	return cuParamSetv(f, offset, &value, sizeof value);
}

CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream s)
{
	SIM_TRY(check_function(f));
	SIM_REQUIRE(width > 0 && height > 0);
	return launch_on(
		s, f,
		LAUNCH((unsigned)width, (unsigned)height, 1, f->block[0], f->block[1], f->block[2], f->shared_bytes, false, NULL, NULL));
}

CUresult cuLaunchGrid(CUfunction f, int width, int height)
{
	return cuLaunchGridAsync(f, width, height, NULL);
}
CUresult cuLaunch(CUfunction f)
{
	return cuLaunchGridAsync(f, 1, 1, NULL);
}

/* ---- occupancy ------------------------------------------------------------------------------------------------------- */

/* Blocks that the registers of an SM hold; a warp takes them in units of 256, where the image says how many. */
static uint32_t blocks_by_registers(CUfunction f, uint32_t threads)
{
	uint32_t warp_registers = (f->kernel->registers * 32 + 255) / 256 * 256, warps = (threads + 31) / 32;
	return warp_registers ? REGISTERS_PER_SM / warp_registers / warps : UINT32_MAX;
}

static uint32_t blocks_by_shared_memory(CUfunction f, const struct sim_device *device, size_t dynamic_bytes)
{
	int per_sm = 0, reserved = 0;
	uint64_t bytes = dynamic_bytes + f->kernel->shared_bytes;
	cuDeviceGetAttribute(&per_sm, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, device->ordinal);
	cuDeviceGetAttribute(&reserved, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, device->ordinal);
	if (dynamic_bytes > (size_t)per_sm)
		return 0;
	return bytes ? (uint32_t)((uint64_t)per_sm / (bytes + (uint64_t)reserved)) : UINT32_MAX;
}

static CUresult occupancy(int *blocks, CUfunction f, int block_size, size_t shared_bytes)
{
	CUcontext context;
	SIM_REQUIRE(blocks && block_size > 0);
	SIM_TRY(check_function(f));
	SIM_TRY(sim_current(&context));
	uint32_t threads = (uint32_t)block_size;
	*blocks = 0;
	if (threads > 1024 || (f->kernel->max_threads && threads > f->kernel->max_threads))
		return CUDA_SUCCESS;
	uint32_t fit = at_most(resident_blocks(context->device, threads), blocks_by_registers(f, threads));
	*blocks = (int)at_most(fit, blocks_by_shared_memory(f, context->device, shared_bytes));
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int block_size, size_t shared_bytes)
{
	return occupancy(blocks, f, block_size, shared_bytes);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int block_size, size_t shared_bytes,
							      unsigned int flags)
{
	SIM_REQUIRE(!(flags & ~1u));
	return occupancy(blocks, f, block_size, shared_bytes);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction f, CUoccupancyB2DSize shared_of, size_t shared_bytes,
						   int limit, unsigned int flags)
{
	CUcontext context;
	int best_threads = 0;
	SIM_REQUIRE(grid && block && !(flags & ~1u));
	SIM_TRY(sim_current(&context));
	for (int size = limit > 0 && limit < 1024 ? limit / 32 * 32 : 1024; size >= 32; size -= 32) {
		int blocks;
		SIM_TRY(occupancy(&blocks, f, size, shared_of ? shared_of(size) : shared_bytes));
		if (blocks * size > best_threads) {
			best_threads = blocks * size;
			*block = size;
			*grid = blocks * (int)context->device->sm_count;
		}
	}
	return best_threads ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction f, CUoccupancyB2DSize shared_of, size_t shared_bytes, int limit)
{
	return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, f, shared_of, shared_bytes, limit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction f, int blocks, int block_size)
{
	CUcontext context;
	int shared_per_sm = 0, most = 0;
	SIM_REQUIRE(bytes && blocks > 0 && block_size > 0 && block_size <= 1024);
	SIM_TRY(check_function(f));
	SIM_TRY(sim_current(&context));
	cuDeviceGetAttribute(&shared_per_sm, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, context->device->ordinal);
	cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, context->device->ordinal);
	size_t share = (size_t)(shared_per_sm / blocks);
	*bytes = share > 1024 ? share - 1024 : 0;
	if (*bytes > (size_t)most)
		*bytes = (size_t)most;
	return CUDA_SUCCESS;
}

/* ---- clusters ----------------------------------------------------------------------------------------------------------- */

/* The device of the stream's context, or of the current one; and how many blocks of the launch its SMs hold together. */
static CUresult cluster_launch(const CUlaunchConfig *config, CUfunction f, const struct sim_device **device, uint64_t *blocks)
{
	CUstream stream;
	int per_sm;
	SIM_REQUIRE(config);
	SIM_TRY(check_function(f));
	SIM_TRY(sim_stream_of(config->hStream, &stream));
	*device = stream->context->device;
	uint64_t threads = (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ;
	SIM_REQUIRE(threads && config->blockDimX <= 1024 && config->blockDimY <= 1024 && config->blockDimZ <= 64 && threads <= 1024);
	SIM_TRY(occupancy(&per_sm, f, (int)threads, config->sharedMemBytes));
	*blocks = (uint64_t)per_sm * (*device)->sm_count;
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int *blocks, CUfunction f, const CUlaunchConfig *config)
{
	const struct sim_device *device;
	uint64_t fit;
	SIM_REQUIRE(blocks);
	SIM_TRY(cluster_launch(config, f, &device, &fit));
	uint32_t most = device->hardware->compute_major < 9 ? 1 : f->non_portable_cluster ? MOST_CLUSTER : MOST_PORTABLE_CLUSTER;
	*blocks = (int)(fit < most ? fit : most);
	return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction f, const CUlaunchConfig *config)
{
	const struct sim_device *device;
	unsigned cluster[3];
	uint64_t fit;
	SIM_REQUIRE(clusters);
	SIM_TRY(cluster_launch(config, f, &device, &fit));
	SIM_TRY(cluster_of(config, f, cluster));
	uint64_t size = cluster_blocks(cluster);
	if (!size)
		return CUDA_ERROR_INVALID_CLUSTER_SIZE;
	SIM_TRY(check_cluster(config, f, device, cluster));
	*clusters = (int)(fit / size);
	return CUDA_SUCCESS;
}
