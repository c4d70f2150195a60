/* SPDX-License-Identifier: Apache-2.0 */
/* routines.c - the routines of routines.def: each launches its work on the handle's stream. */
#include <string.h>

#include "simulated_runtime/blas/calls.h"

#define ELEMENTS_OF_A_BLOCK 1024.0

/* ---- work ------------------------------------------------------------------------------------------------------------ */

/* Sizes below 0 are the program's mistake, and 0 is legal: a routine returns without work. */
static struct blas_work vectors(int cuda_type, double n, double count)
{
	struct blas_type type = blas_type_of(cuda_type);
	return (struct blas_work){ n * type.multiply_adds, n * count * type.bytes, n / ELEMENTS_OF_A_BLOCK, type.rate, false, 0 };
}

static struct blas_work matrix(int cuda_type, double m, double n)
{
	return vectors(cuda_type, m < 0 || n < 0 ? -1 : m * n, 1);
}

static struct blas_work product(int cuda_type, double m, double n, double k, double batch)
{
	if (m < 0 || n < 0 || k < 0 || batch < 0)
		return (struct blas_work){ .bytes = -1 };
	return m > 0 && n > 0 ? blas_product(blas_type_of(cuda_type), m, n, k, batch) : (struct blas_work){ 0 };
}

/* The order of the square matrix that stands on this side of an m x n matrix. */
static double order(int side, double m, double n)
{
	return side == CUBLAS_SIDE_LEFT ? m : n;
}

static struct blas_work computed_as(int compute, struct blas_work work)
{
	work.rate = blas_rate_of(compute, work.rate);
	return work;
}

static cublasStatus_t run(cublasHandle_t handle, struct blas_work work)
{
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (work.bytes < 0)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (work.bytes == 0)
		return CUBLAS_STATUS_SUCCESS;
	if (work.is_product && work.rate == BLAS_FP32 && (handle->math_mode & CUBLAS_MATH_MODE_MASK) == CUBLAS_TF32_TENSOR_OP_MATH)
		work.rate = BLAS_TF32;
	work.sm_count_target = handle->sm_count_target;
	return blas_launch(handle->stream, work);
}

/* ---- what a routine leaves besides its launch -------------------------------------------------------------------------- */

static size_t element_bytes(int cuda_type)
{
	return (size_t)blas_type_of(cuda_type).bytes;
}

/* A scalar on the host is there when the call returns, so the routine waits for its stream; on the device it comes in stream order. */
static void leave_result(cublasHandle_t handle, void *result, size_t bytes)
{
	if (handle->pointer_mode != CUBLAS_POINTER_MODE_HOST || !result)
		return;
	memset(result, 0, bytes);
	blas_driver()->cuStreamSynchronize(handle->stream);
}

/* No factorization fails. */
static void leave_info(void *info)
{
	if (info)
		*(int *)info = 0;
}

static void leave_infos(cublasHandle_t handle, void *infos, int count)
{
	if (infos && count > 0)
		blas_driver()->cuMemsetD32Async((CUdeviceptr)(uintptr_t)infos, 0, (size_t)count, handle->stream);
}

/* ---- the routines ------------------------------------------------------------------------------------------------------ */

#define NOTHING             (void)0
#define RESULT(bytes)       leave_result(handle, result, bytes)
#define INFO(where)         leave_info(where)
#define INFOS(where, count) leave_infos(handle, where, count)

/* A routine looks at sizes alone: no element is read. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define ROUTINE(name, type, parameters, work, after)                  \
	cublasStatus_t name parameters                                \
	{                                                             \
		const int TYPE = type;                                \
		cublasStatus_t status = run(handle, work);            \
		if (status == CUBLAS_STATUS_SUCCESS)                  \
			after;                                        \
		return status;                                        \
	}
#include "simulated_runtime/blas/routines.def"
