/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lt.c - cuBLASLt: descriptors, one algorithm, and products of matrices.
 *
 * An algorithm is one of ours: it needs no workspace, and its settings are kept in its data so that a program reads back what it wrote.
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_runtime/blas/calls.h"

#define ALGO_ID         1
#define ALGO_ATTRIBUTES 9   /* CUBLASLT_ALGO_CONFIG_*: one 32-bit word each */

struct blas_matmul {
	int compute;
	int transa;
	int sm_count_target;
};

struct blas_layout {
	int type;
	int batch;
	uint64_t rows, columns;
};

struct blas_preference {
	int unused;     /* our algorithm meets every preference */
};

size_t cublasLtGetVersion(void)
{
	return BLAS_VERSION;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
	if (!handle)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (!blas_driver())
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*handle = calloc(1, sizeof **handle);
	return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
	free(handle);
	return CUBLAS_STATUS_SUCCESS;
}

/* ---- descriptors ------------------------------------------------------------------------------------------------------- */

#define CREATE(object, ...)                                                      \
	do {                                                                     \
		if (!(object))                                                   \
			return CUBLAS_STATUS_INVALID_VALUE;                      \
		*(object) = malloc(sizeof **(object));                           \
		if (!*(object))                                                  \
			return CUBLAS_STATUS_ALLOC_FAILED;                       \
		**(object) = (__typeof__(**(object))){ __VA_ARGS__ };            \
		return CUBLAS_STATUS_SUCCESS;                                    \
	} while (0)

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *descriptor, int compute, int scale_type)
{
	(void)scale_type;
	CREATE(descriptor, .compute = compute);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, int type, uint64_t rows, uint64_t columns, int64_t ld)
{
	(void)ld;
	CREATE(layout, .type = type, .batch = 1, .rows = rows, .columns = columns);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
	CREATE(preference, 0);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor)
{
	free(descriptor);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
	free(layout);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
	free(preference);
	return CUBLAS_STATUS_SUCCESS;
}

/* Copy an attribute of exactly this size. */
static cublasStatus_t take(void *field, size_t expected, const void *value, size_t bytes)
{
	if (!value || bytes != expected)
		return CUBLAS_STATUS_INVALID_VALUE;
	memcpy(field, value, bytes);
	return CUBLAS_STATUS_SUCCESS;
}

/* Attributes without an influence on sizes (epilogue, bias, scales) are accepted and not kept. */
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t descriptor, int attribute, const void *value, size_t bytes)
{
	if (!descriptor)
		return CUBLAS_STATUS_INVALID_VALUE;
	switch (attribute) {
	case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return take(&descriptor->compute, sizeof descriptor->compute, value, bytes);
	case CUBLASLT_MATMUL_DESC_TRANSA: return take(&descriptor->transa, sizeof descriptor->transa, value, bytes);
	case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
		return take(&descriptor->sm_count_target, sizeof descriptor->sm_count_target, value, bytes);
	default: return value ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
	}
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, int attribute, const void *value, size_t bytes)
{
	if (!layout)
		return CUBLAS_STATUS_INVALID_VALUE;
	switch (attribute) {
	case CUBLASLT_MATRIX_LAYOUT_TYPE: return take(&layout->type, sizeof layout->type, value, bytes);
	case CUBLASLT_MATRIX_LAYOUT_ROWS: return take(&layout->rows, sizeof layout->rows, value, bytes);
	case CUBLASLT_MATRIX_LAYOUT_COLS: return take(&layout->columns, sizeof layout->columns, value, bytes);
	case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return take(&layout->batch, sizeof layout->batch, value, bytes);
	default: return value ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
	}
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, int attribute, const void *value, size_t bytes)
{
	(void)attribute;
	return preference && value && bytes ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* ---- the algorithm ------------------------------------------------------------------------------------------------------ */

static bool fits(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d)
{
	return operation && a && b && d;
}

static void describe(cublasLtMatmulHeuristicResult_t *result)
{
	memset(result, 0, sizeof *result);
	memcpy(&result->algo, &(uint32_t){ ALGO_ID }, sizeof(uint32_t));
	result->state = CUBLAS_STATUS_SUCCESS;
	result->wavesCount = 1;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
					      cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
					      cublasLtMatmulPreference_t preference, int requested,
					      cublasLtMatmulHeuristicResult_t *results, int *found)
{
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (!fits(operation, a, b, d) || !c || !preference || requested < 1 || !results || !found)
		return CUBLAS_STATUS_INVALID_VALUE;
	describe(&results[0]);
	*found = 1;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, int compute, int scale_type, int a_type, int b_type, int c_type, int d_type,
				      int id, cublasLtMatmulAlgo_t *algo)
{
	(void)compute, (void)scale_type, (void)a_type, (void)b_type, (void)c_type, (void)d_type;
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (!algo || id != ALGO_ID)
		return CUBLAS_STATUS_INVALID_VALUE;
	*algo = (cublasLtMatmulAlgo_t){ 0 };
	memcpy(algo, &id, sizeof id);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
				       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
				       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result)
{
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (!fits(operation, a, b, d) || !c || !algo || !result)
		return CUBLAS_STATUS_INVALID_VALUE;
	describe(result);
	result->algo = *algo;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, int attribute, void *value, size_t bytes,
						    size_t *written)
{
	if (!algo || attribute < 0 || attribute >= ALGO_ATTRIBUTES || (bytes && (!value || bytes > sizeof(uint32_t))) ||
	    (!bytes && !written))
		return CUBLAS_STATUS_INVALID_VALUE;
	if (written)
		*written = sizeof(uint32_t);
	if (bytes)
		memcpy(value, (const uint32_t *)algo->data + attribute, bytes);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo, int attribute, const void *value, size_t bytes)
{
	if (!algo || attribute < 0 || attribute >= ALGO_ATTRIBUTES || !value || !bytes || bytes > sizeof(uint32_t))
		return CUBLAS_STATUS_INVALID_VALUE;
	memcpy((uint32_t *)algo->data + attribute, value, bytes);
	return CUBLAS_STATUS_SUCCESS;
}

/* ---- products ------------------------------------------------------------------------------------------------------------ */

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *A,
			      cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C,
			      cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,
			      void *workspace, size_t bytes, cudaStream_t stream)
{
	(void)C, (void)c, (void)algo, (void)workspace, (void)bytes;
	if (!handle)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (!fits(operation, a, b, d) || !alpha || !beta || !A || !B || !D)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (!d->rows || !d->columns || d->batch <= 0)
		return CUBLAS_STATUS_SUCCESS;
	double inner = (double)(operation->transa == CUBLAS_OP_N ? a->columns : a->rows);
	struct blas_work work = blas_product(blas_type_of(a->type), (double)d->rows, (double)d->columns, inner, d->batch);
	work.rate = blas_rate_of(operation->compute, work.rate);
	work.sm_count_target = operation->sm_count_target;
	return blas_launch(stream, work);
}
