/* SPDX-License-Identifier: Apache-2.0 */
/* calls.h - the prototypes of what the two libraries export. Pointers have no element type here: the binary interface is the same. */
#ifndef ALIQUOT_BLAS_CALLS_H
#define ALIQUOT_BLAS_CALLS_H

#include "simulated_runtime/blas/blas.h"

#define HANDLE cublasHandle_t handle
#define IN     const void *
#define OUT    void *

#define EACH_CZ(suffix, parameters, work, after)                        \
	ROUTINE(cublasC##suffix, CUDA_C_32F, parameters, work, after)   \
	ROUTINE(cublasZ##suffix, CUDA_C_64F, parameters, work, after)
#define EACH_SDCZ(suffix, parameters, work, after)                      \
	ROUTINE(cublasS##suffix, CUDA_R_32F, parameters, work, after)   \
	ROUTINE(cublasD##suffix, CUDA_R_64F, parameters, work, after)   \
	EACH_CZ(suffix, parameters, work, after)

#define ROUTINE(name, type, parameters, work, after) BLAS_API cublasStatus_t name parameters;
#include "simulated_runtime/blas/routines.def"
#undef ROUTINE

/* ---- handle.c -------------------------------------------------------------------------------------------------------- */

typedef CUstream cudaStream_t;

BLAS_API cublasStatus_t cublasCreate_v2(cublasHandle_t *handle);
BLAS_API cublasStatus_t cublasDestroy_v2(HANDLE);
BLAS_API cublasStatus_t cublasSetStream_v2(HANDLE, cudaStream_t stream);
BLAS_API cublasStatus_t cublasGetStream_v2(HANDLE, cudaStream_t *stream);
BLAS_API cublasStatus_t cublasSetPointerMode_v2(HANDLE, int mode);
BLAS_API cublasStatus_t cublasGetPointerMode_v2(HANDLE, int *mode);
BLAS_API cublasStatus_t cublasSetMathMode(HANDLE, int mode);
BLAS_API cublasStatus_t cublasGetMathMode(HANDLE, int *mode);
BLAS_API cublasStatus_t cublasSetSmCountTarget(HANDLE, int count);
BLAS_API cublasStatus_t cublasGetSmCountTarget(HANDLE, int *count);
BLAS_API cublasStatus_t cublasGetVersion_v2(HANDLE, int *version);
BLAS_API cublasStatus_t cublasSetWorkspace_v2(HANDLE, void *workspace, size_t bytes);
BLAS_API cublasStatus_t cublasSetMatrixAsync(int rows, int cols, int element, IN A, int lda, OUT B, int ldb, cudaStream_t stream);
BLAS_API cublasStatus_t cublasGetMatrixAsync(int rows, int cols, int element, IN A, int lda, OUT B, int ldb, cudaStream_t stream);
BLAS_API cublasStatus_t cublasSetVectorAsync(int n, int element, IN host, int incx, OUT device, int incy, cudaStream_t stream);
BLAS_API cublasStatus_t cublasGetVectorAsync(int n, int element, IN device, int incx, OUT host, int incy, cudaStream_t stream);

/* ---- lt.c ------------------------------------------------------------------------------------------------------------ */

typedef struct blas_matmul *cublasLtMatmulDesc_t;
typedef struct blas_layout *cublasLtMatrixLayout_t;
typedef struct blas_preference *cublasLtMatmulPreference_t;
typedef cublasHandle_t cublasLtHandle_t;    /* a cuBLAS handle may be used as one */

typedef struct {
	uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct {
	cublasLtMatmulAlgo_t algo;
	size_t workspaceSize;
	cublasStatus_t state;
	float wavesCount;
	int reserved[4];
} cublasLtMatmulHeuristicResult_t;

enum {
	CUBLASLT_MATRIX_LAYOUT_TYPE = 0,
	CUBLASLT_MATRIX_LAYOUT_ROWS = 2,
	CUBLASLT_MATRIX_LAYOUT_COLS = 3,
	CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5
};
enum { CUBLASLT_MATMUL_DESC_COMPUTE_TYPE = 0, CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15 };

BLAS_API size_t cublasLtGetVersion(void);
BLAS_API cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle);
BLAS_API cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle);
BLAS_API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *descriptor, int compute, int scale_type);
BLAS_API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor);
BLAS_API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t descriptor, int attribute, IN value, size_t bytes);
BLAS_API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
BLAS_API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout);
BLAS_API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, int attribute, IN value, size_t bytes);
BLAS_API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference);
BLAS_API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference);
BLAS_API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, int attribute, IN value, size_t bytes);
BLAS_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
						       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
						       cublasLtMatmulPreference_t preference, int requested,
						       cublasLtMatmulHeuristicResult_t *results, int *found);
BLAS_API cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, int compute, int scale_type, int a_type, int b_type, int c_type,
					       int d_type, int id, cublasLtMatmulAlgo_t *algo);
BLAS_API cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
						cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
						const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result);
BLAS_API cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, int attribute, OUT value, size_t bytes,
							     size_t *written);
BLAS_API cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo, int attribute, IN value, size_t bytes);
BLAS_API cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, IN alpha, IN A, cublasLtMatrixLayout_t a,
				       IN B, cublasLtMatrixLayout_t b, IN beta, IN C, cublasLtMatrixLayout_t c, OUT D,
				       cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo, OUT workspace, size_t bytes,
				       cudaStream_t stream);

#endif
