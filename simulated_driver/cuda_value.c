/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_value.c - stream memory operations: a stream writes a word, or waits until one fits (cuStreamWriteValue, cuStreamWaitValue,
 * cuStreamBatchMemOp).
 *
 * The engine looks at the word when the stream gets there, and again every FOREIGN_QUANTUM_NS (engine.c): the host, another device or
 * another process may write it. A batch is its operations in a row. Flushes and barriers have nothing to do: all writes of this driver are
 * visible at once. Inside a capture the newer forms become one node; the older forms are not allowed there.
 */
#include "simulated_driver/cuda_internal.h"

#define WAIT_CONDITION 3u

static CUresult locate_word(CUdeviceptr address, uint8_t bytes, const struct sim_device *device, void **word)
{
	struct sim_host_range host;
	struct sim_range range;
	SIM_REQUIRE(address && address % bytes == 0);
	if (!sim_memory_is_ours(address)) {
		*word = (void *)(uintptr_t)address;
		return sim_host_find(*word, &host) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	}
	SIM_REQUIRE(sim_memory_find(address, &range) && !range.managed);
	*word = sim_memory_bytes(address, bytes, device);
	return *word ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult resolve_wait(const CUstreamBatchMemOpParams *operation, uint8_t bytes, const struct sim_device *device,
			     struct sim_work *work)
{
	static const uint8_t conditions[] = { SIM_VALUE_WAIT_GEQ, SIM_VALUE_WAIT_EQ, SIM_VALUE_WAIT_AND, SIM_VALUE_WAIT_NOR };
	unsigned flags = operation->waitValue.flags;
	SIM_REQUIRE(!(flags & ~(WAIT_CONDITION | CU_STREAM_WAIT_VALUE_FLUSH)));
	work->foreign = true;
	work->value.operation = conditions[flags & WAIT_CONDITION];
	work->value.value = operation->waitValue.value64;
	return locate_word(operation->waitValue.address, bytes, device, &work->value.word);
}

static CUresult resolve_write(const CUstreamBatchMemOpParams *operation, uint8_t bytes, const struct sim_device *device,
			      struct sim_work *work)
{
	SIM_REQUIRE(!(operation->writeValue.flags & ~(unsigned)CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
	work->value.operation = SIM_VALUE_WRITE;
	work->value.value = operation->writeValue.value64;
	return locate_word(operation->writeValue.address, bytes, device, &work->value.word);
}

/* *is_work: whether there is anything to do. */
static CUresult resolve_one(const CUstreamBatchMemOpParams *operation, const struct sim_device *device, struct sim_work *work,
			    bool *is_work)
{
	*is_work = true;
	*work = (struct sim_work){ .kind = SIM_WORK_VALUE };
	work->value.bytes = 8;
	switch (operation->operation) {
	case CU_STREAM_MEM_OP_WAIT_VALUE_32: work->value.bytes = 4; return resolve_wait(operation, 4, device, work);
	case CU_STREAM_MEM_OP_WAIT_VALUE_64: return resolve_wait(operation, 8, device, work);
	case CU_STREAM_MEM_OP_WRITE_VALUE_32: work->value.bytes = 4; return resolve_write(operation, 4, device, work);
	case CU_STREAM_MEM_OP_WRITE_VALUE_64: return resolve_write(operation, 8, device, work);
	case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
		*is_work = false;
		return operation->flushRemoteWrites.flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	case CU_STREAM_MEM_OP_BARRIER:
		*is_work = false;
		return operation->memoryBarrier.flags > CU_STREAM_MEMORY_BARRIER_TYPE_GPU ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_values_resolve(unsigned count, const CUstreamBatchMemOpParams *operations, const struct sim_device *device,
			    struct sim_work *work, unsigned *n_work)
{
	bool is_work;
	SIM_REQUIRE(count <= SIM_MAX_VALUES && (count == 0 || operations));
	*n_work = 0;
	for (unsigned i = 0; i < count; i++) {
		SIM_TRY(resolve_one(&operations[i], device, &work[*n_work], &is_work));
		*n_work += is_work;
	}
	return CUDA_SUCCESS;
}

/* `newer`: the second version of the interface. */
static CUresult submit(CUstream handle, unsigned count, const CUstreamBatchMemOpParams *operations, unsigned flags, bool newer)
{
	CUstream stream;
	struct sim_work work[SIM_MAX_VALUES];
	unsigned n_work;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(flags == 0 && count <= SIM_MAX_VALUES && (count == 0 || operations));
	for (unsigned i = 0; i < count; i++)
		SIM_REQUIRE(newer || operations[i].operation != CU_STREAM_MEM_OP_BARRIER);
	if (sim_capturing(stream))
		return newer ? sim_capture_values(stream, count, operations) : sim_capture_refuse(stream);
	SIM_TRY(sim_values_resolve(count, operations, stream->context->device, work, &n_work));
	for (unsigned i = 0; i < n_work; i++)
		SIM_TRY(sim_engine_submit(stream, &work[i]));
	return CUDA_SUCCESS;
}

static CUresult wait_for(CUstream stream, CUstreamBatchMemOpType operation, CUdeviceptr address, uint64_t value, unsigned flags, bool newer)
{
	CUstreamBatchMemOpParams wanted = { .waitValue = { .operation = operation, .address = address, .value64 = value, .flags = flags } };
	return submit(stream, 1, &wanted, 0, newer);
}

static CUresult write_to(CUstream stream, CUstreamBatchMemOpType operation, CUdeviceptr address, uint64_t value, unsigned flags, bool newer)
{
	CUstreamBatchMemOpParams wanted = { .writeValue = {
						.operation = operation, .address = address, .value64 = value, .flags = flags } };
	return submit(stream, 1, &wanted, 0, newer);
}

/* clang-format off */
#define VALUE_FORM(name, type, call, operation, newer)                                   \
	CUresult name(CUstream s, CUdeviceptr address, type value, unsigned int flags)   \
	{                                                                                \
		return call(s, operation, address, value, flags, newer);                 \
	}                                                                                \
	CUresult name##_ptsz(CUstream s, CUdeviceptr address, type value, unsigned int flags) \
	{                                                                                \
		return call(sim_own(s), operation, address, value, flags, newer);        \
	}
#define VALUE_FORMS(name, type, call, operation)            \
	VALUE_FORM(name, type, call, operation, false)      \
	VALUE_FORM(name##_v2, type, call, operation, true)

VALUE_FORMS(cuStreamWaitValue32, cuuint32_t, wait_for, CU_STREAM_MEM_OP_WAIT_VALUE_32)
VALUE_FORMS(cuStreamWaitValue64, cuuint64_t, wait_for, CU_STREAM_MEM_OP_WAIT_VALUE_64)
VALUE_FORMS(cuStreamWriteValue32, cuuint32_t, write_to, CU_STREAM_MEM_OP_WRITE_VALUE_32)
VALUE_FORMS(cuStreamWriteValue64, cuuint64_t, write_to, CU_STREAM_MEM_OP_WRITE_VALUE_64)
/* clang-format on */

CUresult cuStreamBatchMemOp(CUstream s, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags)
{
	return submit(s, count, operations, flags, false);
}
CUresult cuStreamBatchMemOp_ptsz(CUstream s, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags)
{
	return submit(sim_own(s), count, operations, flags, false);
}
CUresult cuStreamBatchMemOp_v2(CUstream s, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags)
{
	return submit(s, count, operations, flags, true);
}
CUresult cuStreamBatchMemOp_v2_ptsz(CUstream s, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags)
{
	return submit(sim_own(s), count, operations, flags, true);
}
