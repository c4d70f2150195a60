/* SPDX-License-Identifier: Apache-2.0 */
/* handle.c - cuBLAS handles: their workspace and settings, and the copies that use no handle. */
#include <stdlib.h>

#include "simulated_runtime/blas/calls.h"

#define MIB ((size_t)1 << 20)

/* ---- begin and end --------------------------------------------------------------------------------------------------- */

/* The runtime's rule: a thread without a context works in the primary context of the first device. */
static bool have_context(const struct blas_driver *cu)
{
	CUcontext context = NULL;
	if (cu->cuCtxGetCurrent(&context) == CUDA_SUCCESS && context)
		return true;
	return cu->cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS && cu->cuCtxSetCurrent(context) == CUDA_SUCCESS;
}

/* cuBLAS documentation, cublasSetWorkspace: the default is 32 MiB on Hopper and newer, 4 MiB before. */
static size_t workspace_bytes(const struct blas_driver *cu)
{
	CUdevice device = 0;
	int major = 0;
	cu->cuCtxGetDevice(&device);
	cu->cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
	return (major >= 9 ? 32 : 4) * MIB;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle)
{
	const struct blas_driver *cu = blas_driver();
	if (!handle)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (!cu || !have_context(cu))
		return CUBLAS_STATUS_NOT_INITIALIZED;
	cublasHandle_t created = calloc(1, sizeof *created);
	if (!created || cu->cuMemAlloc_v2(&created->workspace, workspace_bytes(cu)) != CUDA_SUCCESS) {
		free(created);
		return CUBLAS_STATUS_ALLOC_FAILED;
	}
	*handle = created;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle)
{
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (handle->workspace)
		blas_driver()->cuMemFree_v2(handle->workspace);
	free(handle);
	return CUBLAS_STATUS_SUCCESS;
}

/* ---- settings -------------------------------------------------------------------------------------------------------- */

#define SETTING(name, parameter, statement) \
	cublasStatus_t name(cublasHandle_t handle, parameter)        \
	{                                   \
		if (!handle)                \
			return CUBLAS_STATUS_NOT_INITIALIZED;                 \
		statement;                  \
		return CUBLAS_STATUS_SUCCESS;                                 \
	}

#define READING(name, type, field)          \
	cublasStatus_t name(cublasHandle_t handle, type *value)      \
	{                                   \
		if (!handle)                \
			return CUBLAS_STATUS_NOT_INITIALIZED;                 \
		if (!value)                 \
			return CUBLAS_STATUS_INVALID_VALUE;                   \
		*value = handle->field;     \
		return CUBLAS_STATUS_SUCCESS;                                 \
	}

SETTING(cublasSetStream_v2, cudaStream_t stream, handle->stream = stream)
SETTING(cublasSetPointerMode_v2, int mode, handle->pointer_mode = mode)
SETTING(cublasSetMathMode, int mode, handle->math_mode = mode)
SETTING(cublasSetSmCountTarget, int count, handle->sm_count_target = count)
READING(cublasGetStream_v2, cudaStream_t, stream)
READING(cublasGetPointerMode_v2, int, pointer_mode)
READING(cublasGetMathMode, int, math_mode)
READING(cublasGetSmCountTarget, int, sm_count_target)

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version)
{
	(void)handle;   /* may be NULL */
	if (!version)
		return CUBLAS_STATUS_INVALID_VALUE;
	*version = BLAS_VERSION;
	return CUBLAS_STATUS_SUCCESS;
}

/* The program's workspace replaces the default one, which goes. */
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes)
{
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if ((uintptr_t)workspace % 256 || (!workspace && bytes))
		return CUBLAS_STATUS_INVALID_VALUE;
	if (handle->workspace)
		blas_driver()->cuMemFree_v2(handle->workspace);
	handle->workspace = 0;
	return CUBLAS_STATUS_SUCCESS;
}

/* ---- copies ---------------------------------------------------------------------------------------------------------- */

/* Column-major: a column is contiguous, so it is a row of the driver's copy. */
static cublasStatus_t copy(int rows, int columns, int element, const void *from, int from_ld, void *to, int to_ld, bool to_device,
			   CUstream stream)
{
	const struct blas_driver *cu = blas_driver();
	if (!cu)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (rows < 0 || columns < 0 || element <= 0 || from_ld <= 0 || to_ld <= 0)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (!rows || !columns)
		return CUBLAS_STATUS_SUCCESS;
	CUDA_MEMCPY2D moved = {
		.srcMemoryType = to_device ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE,
		.srcHost = to_device ? from : NULL,
		.srcDevice = to_device ? 0 : (CUdeviceptr)(uintptr_t)from,
		.srcPitch = (size_t)from_ld * (size_t)element,
		.dstMemoryType = to_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST,
		.dstHost = to_device ? NULL : to,
		.dstDevice = to_device ? (CUdeviceptr)(uintptr_t)to : 0,
		.dstPitch = (size_t)to_ld * (size_t)element,
		.WidthInBytes = (size_t)rows * (size_t)element,
		.Height = (size_t)columns,
	};
	return cu->cuMemcpy2DAsync_v2(&moved, stream) == CUDA_SUCCESS ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t cublasSetMatrixAsync(int rows, int cols, int element, const void *A, int lda, void *B, int ldb, cudaStream_t stream)
{
	return copy(rows, cols, element, A, lda, B, ldb, true, stream);
}

cublasStatus_t cublasGetMatrixAsync(int rows, int cols, int element, const void *A, int lda, void *B, int ldb, cudaStream_t stream)
{
	return copy(rows, cols, element, A, lda, B, ldb, false, stream);
}

/* A vector with a stride is a matrix of one row. */
cublasStatus_t cublasSetVectorAsync(int n, int element, const void *host, int incx, void *device, int incy, cudaStream_t stream)
{
	return copy(1, n, element, host, incx, device, incy, true, stream);
}

cublasStatus_t cublasGetVectorAsync(int n, int element, const void *device, int incx, void *host, int incy, cudaStream_t stream)
{
	return copy(1, n, element, device, incx, host, incy, false, stream);
}
