/* SPDX-License-Identifier: Apache-2.0 */
/* test_blas.c - the stand-in for cuBLAS and cuBLASLt on the simulated driver: handles, time that work takes, descriptors, copies. */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/tests/harness.h"
#include "simulated_runtime/blas/calls.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define WAIT_US      300000     /* a busy machine keeps a process from its processor for less than that */

static const float one = 1;

static cublasHandle_t new_handle(void)
{
	cublasHandle_t handle;
	test_context(0);
	CHECK_EQUAL(cublasCreate_v2(&handle), CUBLAS_STATUS_SUCCESS);
	return handle;
}

static void destroy(cublasHandle_t handle)
{
	CHECK_EQUAL(cublasDestroy_v2(handle), CUBLAS_STATUS_SUCCESS);
}

static CUdeviceptr allocated(size_t bytes)
{
	CUdeviceptr pointer;
	OK(cuMemAlloc_v2(&pointer, bytes));
	return pointer;
}

/* Simulated microseconds between two records with `work` between them. The stream is busy first, so that everything is queued by then. */
struct timing {
	CUstream stream;
	CUevent begin, end;
};

static struct timing begin_timing(CUstream stream)
{
	struct timing timing = { .stream = stream };
	OK(cuEventCreate(&timing.begin, CU_EVENT_DEFAULT));
	OK(cuEventCreate(&timing.end, CU_EVENT_DEFAULT));
	OK(test_launch(test_spin(), WAIT_US, stream));
	OK(cuEventRecord(timing.begin, stream));
	return timing;
}

static double end_timing(struct timing timing)
{
	float ms;
	OK(cuEventRecord(timing.end, timing.stream));
	OK(cuEventSynchronize(timing.end));
	OK(cuEventElapsedTime(&ms, timing.begin, timing.end));
	return ms * 1000;
}

/* ---- handles ----------------------------------------------------------------------------------------------------------- */

static void a_handle_costs_its_workspace_until_the_program_sets_one(void)
{
	test_context(0);
	uint64_t before = test_free_bytes();
	cublasHandle_t handle;
	CHECK_EQUAL(cublasCreate_v2(&handle), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(before - test_free_bytes(), 32 * MIB);
	void *own = (void *)(uintptr_t)allocated(MIB);
	CHECK_EQUAL(cublasSetWorkspace_v2(handle, own, MIB), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(before - test_free_bytes(), 2 * MIB);   /* the driver's granule */
	CHECK_EQUAL(cublasSetWorkspace_v2(handle, (char *)own + 1, MIB), CUBLAS_STATUS_INVALID_VALUE);
	CHECK_EQUAL(cublasDestroy_v2(handle), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(before - test_free_bytes(), 2 * MIB);
}

static void a_full_device_refuses_a_handle(void)
{
	cublasHandle_t handle;
	test_context(0);
	for (size_t piece = GIB; piece >= MIB; piece /= 2)
		for (CUdeviceptr pointer; cuMemAlloc_v2(&pointer, piece) == CUDA_SUCCESS;)
			;
	CHECK_EQUAL(cublasCreate_v2(&handle), CUBLAS_STATUS_ALLOC_FAILED);
}

static void a_thread_without_a_context_gets_the_primary_one(void)
{
	cublasHandle_t handle;
	CUcontext context = NULL;
	CHECK_EQUAL(cublasCreate_v2(&handle), CUBLAS_STATUS_SUCCESS);
	OK(cuCtxGetCurrent(&context));
	CHECK(context != NULL);
	destroy(handle);
}

static void settings_read_back(void)
{
	cublasHandle_t handle = new_handle();
	CUstream stream, found;
	int value;
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CHECK_EQUAL(cublasSetStream_v2(handle, stream), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasGetStream_v2(handle, &found), CUBLAS_STATUS_SUCCESS);
	CHECK(found == stream);
	CHECK_EQUAL(cublasSetPointerMode_v2(handle, 1), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasGetPointerMode_v2(handle, &value), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(value, 1);
	CHECK_EQUAL(cublasSetMathMode(handle, CUBLAS_TF32_TENSOR_OP_MATH), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasGetMathMode(handle, &value), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(value, CUBLAS_TF32_TENSOR_OP_MATH);
	CHECK_EQUAL(cublasSetSmCountTarget(handle, 66), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasGetSmCountTarget(handle, &value), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(value, 66);
	CHECK_EQUAL(cublasGetVersion_v2(NULL, &value), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL((size_t)value, cublasLtGetVersion());
	CHECK_EQUAL(cublasSetStream_v2(NULL, stream), CUBLAS_STATUS_NOT_INITIALIZED);
}

/* ---- time -------------------------------------------------------------------------------------------------------------- */

/* A square product on an H200: 2 x 4096^3 operations at 132 SMs x 1.98 GHz x the rate of one SM. */
static double square_product_us(int type, int compute, int math_mode, int sms)
{
	cublasHandle_t handle = new_handle();
	CUdeviceptr a = allocated(128 * MIB);
	void *p = (void *)(uintptr_t)a;
	CHECK_EQUAL(cublasSetMathMode(handle, math_mode), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasSetSmCountTarget(handle, sms), CUBLAS_STATUS_SUCCESS);
	struct timing timing = begin_timing(NULL);
	CHECK_EQUAL(cublasGemmEx(handle, 0, 0, 4096, 4096, 4096, &one, p, type, 4096, p, type, 4096, &one, p, type, 4096, compute, -1),
		    CUBLAS_STATUS_SUCCESS);
	double us = end_timing(timing);
	destroy(handle);
	return us;
}

static void a_product_takes_the_time_of_its_precision(void)
{
	static const struct {
		int type, compute, math_mode, sms;
		double us;
	} cases[] = {
		{ CUDA_R_64F, 70, 0, 0, 2054.6 },
		{ CUDA_R_32F, 68, 0, 0, 2054.6 },
		{ CUDA_R_32F, 68, CUBLAS_TF32_TENSOR_OP_MATH, 0, 256.8 },
		{ CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, 0, 0, 256.8 },
		{ CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_16BF, 0, 0, 128.4 },
		{ CUDA_R_16F, 68, 0, 0, 128.4 },
		{ CUDA_R_16BF, 68, 0, 66, 256.8 },
		{ CUDA_R_8I, 72, 0, 0, 64.2 },
	};
	for (size_t i = 0; i < COUNT(cases); i++) {
		double us = square_product_us(cases[i].type, cases[i].compute, cases[i].math_mode, cases[i].sms);
		CHECK_BETWEEN(us, cases[i].us - 1, cases[i].us + 1);
	}
}

/* 1 GiB three times at 6144 bits x 2 x 3.201 GHz. */
static void vectors_take_the_time_of_their_memory(void)
{
	cublasHandle_t handle = new_handle();
	void *p = (void *)(uintptr_t)allocated(GIB);
	struct timing timing = begin_timing(NULL);
	CHECK_EQUAL(cublasSaxpy_v2(handle, 1 << 28, &one, p, 1, p, 1), CUBLAS_STATUS_SUCCESS);
	CHECK_BETWEEN(end_timing(timing), 654, 657);
	destroy(handle);
}

static void work_is_on_the_stream_of_the_handle(void)
{
	cublasHandle_t handle = new_handle();
	void *p = (void *)(uintptr_t)allocated(256 * MIB);
	CUstream stream;
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CHECK_EQUAL(cublasSetStream_v2(handle, stream), CUBLAS_STATUS_SUCCESS);
	OK(test_launch(test_spin(), WAIT_US, stream));
	CHECK_EQUAL(cublasSgemm_v2(handle, 0, 0, 64, 64, 64, &one, p, 64, p, 64, &one, p, 64), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
	CHECK_EQUAL(cuStreamQuery(NULL), CUDA_SUCCESS);
	destroy(handle);
}

static void host_results_wait_and_device_results_do_not(void)
{
	cublasHandle_t handle = new_handle();
	void *p = (void *)(uintptr_t)allocated(MIB);
	float result = 5;
	OK(test_launch(test_spin(), WAIT_US, NULL));
	CHECK_EQUAL(cublasSetPointerMode_v2(handle, 1), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasSdot_v2(handle, 64, p, 1, p, 1, p), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
	CHECK_EQUAL(cublasSetPointerMode_v2(handle, CUBLAS_POINTER_MODE_HOST), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasSdot_v2(handle, 64, p, 1, p, 1, &result), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cuStreamQuery(NULL), CUDA_SUCCESS);
	CHECK_EQUAL(result, 0);
	destroy(handle);
}

static void sizes_of_zero_do_nothing_and_negative_ones_are_invalid(void)
{
	cublasHandle_t handle = new_handle();
	void *p = (void *)(uintptr_t)allocated(MIB);
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(cublasSgemm_v2(handle, 0, 0, 0, 64, 64, &one, p, 64, p, 64, &one, p, 64), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasSaxpy_v2(handle, 0, &one, p, 1, p, 1), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cuStreamQuery(NULL), CUDA_SUCCESS);
	CHECK_EQUAL(cublasSgemm_v2(handle, 0, 0, 64, 64, -1, &one, p, 64, p, 64, &one, p, 64), CUBLAS_STATUS_INVALID_VALUE);
	CHECK_EQUAL(cublasSgemv_v2(handle, 0, -64, -64, &one, p, 64, p, 1, &one, p, 1), CUBLAS_STATUS_INVALID_VALUE);
	CHECK_EQUAL(cublasSaxpy_v2(handle, -1, &one, p, 1, p, 1), CUBLAS_STATUS_INVALID_VALUE);
	CHECK_EQUAL(cublasSaxpy_v2(NULL, 1, &one, p, 1, p, 1), CUBLAS_STATUS_NOT_INITIALIZED);
	destroy(handle);
}

static void factorizations_report_success(void)
{
	cublasHandle_t handle = new_handle();
	void *p = (void *)(uintptr_t)allocated(MIB);
	CUdeviceptr infos = allocated(MIB);
	int info = 7, on_host[4] = { 9, 9, 9, 9 };
	OK(cuMemcpyHtoD_v2(infos, on_host, sizeof on_host));
	CHECK_EQUAL(cublasSgetrfBatched(handle, 64, p, 64, p, (void *)(uintptr_t)infos, 4), CUBLAS_STATUS_SUCCESS);
	OK(cuMemcpyDtoH_v2(on_host, infos, sizeof on_host));
	CHECK_EQUAL(on_host[0] + on_host[3], 0);
	CHECK_EQUAL(cublasSgetrsBatched(handle, 0, 64, 1, p, 64, p, p, 64, &info, 4), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(info, 0);
}

/* ---- cuBLASLt ---------------------------------------------------------------------------------------------------------- */

struct lt {
	cublasLtMatmulDesc_t operation;
	cublasLtMatrixLayout_t a, b, d;
	cublasLtMatmulPreference_t preference;
};

/* A is stored as k x m and transposed, as PyTorch's Linear passes it. */
static struct lt lt_product(int m, int n, int k, int batch)
{
	struct lt lt;
	int transposed = 1;
	CHECK_EQUAL(cublasLtMatmulDescCreate(&lt.operation, 68, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmulDescSetAttribute(lt.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
		    CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutCreate(&lt.a, CUDA_R_16BF, (uint64_t)k, (uint64_t)m, k), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutCreate(&lt.b, CUDA_R_16BF, (uint64_t)k, (uint64_t)n, k), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutCreate(&lt.d, CUDA_R_16BF, (uint64_t)m, (uint64_t)n, m), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutSetAttribute(lt.d, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
		    CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmulPreferenceCreate(&lt.preference), CUBLAS_STATUS_SUCCESS);
	return lt;
}

static void lt_destroy(struct lt lt)
{
	CHECK_EQUAL(cublasLtMatmulDescDestroy(lt.operation), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutDestroy(lt.a), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutDestroy(lt.b), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatrixLayoutDestroy(lt.d), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmulPreferenceDestroy(lt.preference), CUBLAS_STATUS_SUCCESS);
}

static void the_heuristic_finds_an_algorithm_that_works(void)
{
	cublasHandle_t handle = new_handle();
	void *p = (void *)(uintptr_t)allocated(128 * MIB);
	struct lt lt = lt_product(4096, 2048, 1024, 4);
	cublasLtMatmulHeuristicResult_t results[8];
	int found = 0;
	CHECK_EQUAL(cublasLtMatmulAlgoGetHeuristic(handle, lt.operation, lt.a, lt.b, lt.d, lt.d, lt.preference, 8, results, &found),
		    CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(found, 1);
	CHECK_EQUAL(results[0].state, CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmulAlgoCheck(handle, lt.operation, lt.a, lt.b, lt.d, lt.d, &results[0].algo, &results[1]),
		    CUBLAS_STATUS_SUCCESS);
	struct timing timing = begin_timing(NULL);
	CHECK_EQUAL(cublasLtMatmul(handle, lt.operation, &one, p, lt.a, p, lt.b, &one, p, lt.d, p, lt.d, &results[0].algo, NULL, 0, NULL),
		    CUBLAS_STATUS_SUCCESS);
	CHECK_BETWEEN(end_timing(timing), 63.2, 65.2);
	lt_destroy(lt);
	destroy(handle);
}

static void settings_of_an_algorithm_read_back(void)
{
	cublasHandle_t handle = new_handle();
	cublasLtMatmulAlgo_t algo;
	uint32_t value = 3, found = 0;
	size_t written = 0;
	CHECK_EQUAL(cublasLtMatmulAlgoInit(handle, 68, 0, 0, 0, 0, 0, 1, &algo), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmulAlgoConfigSetAttribute(&algo, 2, &value, sizeof value), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmulAlgoConfigGetAttribute(&algo, 2, &found, sizeof found, &written), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(found, 3);
	CHECK_EQUAL(written, sizeof found);
	CHECK_EQUAL(cublasLtMatmulAlgoConfigSetAttribute(&algo, 9, &value, sizeof value), CUBLAS_STATUS_INVALID_VALUE);
	CHECK_EQUAL(cublasLtMatmulAlgoInit(handle, 68, 0, 0, 0, 0, 0, 99, &algo), CUBLAS_STATUS_INVALID_VALUE);
	destroy(handle);
}

static void a_light_handle_serves_alone(void)
{
	cublasLtHandle_t handle;
	struct lt lt = lt_product(64, 64, 64, 1);
	test_context(0);
	void *p = (void *)(uintptr_t)allocated(MIB);
	CHECK_EQUAL(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmul(handle, lt.operation, &one, p, lt.a, p, lt.b, &one, p, lt.d, p, lt.d, NULL, NULL, 0, NULL),
		    CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasLtMatmul(handle, NULL, &one, p, lt.a, p, lt.b, &one, p, lt.d, p, lt.d, NULL, NULL, 0, NULL),
		    CUBLAS_STATUS_INVALID_VALUE);
	CHECK_EQUAL(cublasLtDestroy(handle), CUBLAS_STATUS_SUCCESS);
	lt_destroy(lt);
}

/* ---- copies ------------------------------------------------------------------------------------------------------------ */

static void copies_keep_elements_apart_by_their_strides(void)
{
	int host[6] = { 1, 2, 3, 4, 5, 6 }, back[6] = { 0 };
	test_context(0);
	void *device = (void *)(uintptr_t)allocated(MIB);
	CHECK_EQUAL(cublasSetMatrixAsync(2, 3, 4, host, 2, device, 2, NULL), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasGetMatrixAsync(2, 3, 4, device, 2, back, 2, NULL), CUBLAS_STATUS_SUCCESS);
	OK(cuStreamSynchronize(NULL));
	CHECK(memcmp(host, back, sizeof host) == 0);
	CHECK_EQUAL(cublasSetVectorAsync(3, 4, host, 2, device, 1, NULL), CUBLAS_STATUS_SUCCESS);
	CHECK_EQUAL(cublasGetVectorAsync(3, 4, device, 1, back, 1, NULL), CUBLAS_STATUS_SUCCESS);
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(back[1], 3);
	CHECK_EQUAL(back[2], 5);
	CHECK_EQUAL(cublasSetVectorAsync(3, 4, host, 0, device, 1, NULL), CUBLAS_STATUS_INVALID_VALUE);
}

int main(int argc, char **argv)
{
	static const struct test_case cases[] = {
		CASE(a_handle_costs_its_workspace_until_the_program_sets_one, "h200x8"),
		CASE(a_full_device_refuses_a_handle, "t4x2"),
		CASE(a_thread_without_a_context_gets_the_primary_one, "t4x2"),
		CASE(settings_read_back, "t4x2"),
		CASE(a_product_takes_the_time_of_its_precision, "h200x8"),
		CASE(vectors_take_the_time_of_their_memory, "h200x8"),
		CASE(work_is_on_the_stream_of_the_handle, "h200x8"),
		CASE(host_results_wait_and_device_results_do_not, "h200x8"),
		CASE(sizes_of_zero_do_nothing_and_negative_ones_are_invalid, "t4x2"),
		CASE(factorizations_report_success, "t4x2"),
		CASE(the_heuristic_finds_an_algorithm_that_works, "h200x8"),
		CASE(settings_of_an_algorithm_read_back, "t4x2"),
		CASE(a_light_handle_serves_alone, "t4x2"),
		CASE(copies_keep_elements_apart_by_their_strides, "t4x2"),
	};
	return test_main(argc, argv, cases, COUNT(cases));
}
