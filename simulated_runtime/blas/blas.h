/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blas.h - a stand-in for cuBLAS and cuBLASLt of CUDA 13, for programs on the simulated driver.
 *
 * NVIDIA's libraries carry a CUDA runtime of their own, which the simulated driver does not serve. These two have the names that PyTorch
 * imports, by the public headers cublas_api.h and cublasLt.h, and do what matters for sharing a GPU: a handle costs its workspace, and each
 * call with work launches one kernel on the handle's stream for as long as the work takes (gpu.c). No result is computed.
 *
 * Interface: handle.c has handles and copies, routines.c the routines, lt.c cuBLASLt. Names, types and values are NVIDIA's.
 */
#ifndef ALIQUOT_BLAS_H
#define ALIQUOT_BLAS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

#define BLAS_API __attribute__((visibility("default")))

/* Of the wheel nvidia-cublas 13.4.1, which torch 2.15 requires. */
#define BLAS_VERSION 130401

typedef enum {
	CUBLAS_STATUS_SUCCESS = 0,
	CUBLAS_STATUS_NOT_INITIALIZED = 1,
	CUBLAS_STATUS_ALLOC_FAILED = 3,
	CUBLAS_STATUS_INVALID_VALUE = 7,
	CUBLAS_STATUS_EXECUTION_FAILED = 13,
	CUBLAS_STATUS_NOT_SUPPORTED = 15,
} cublasStatus_t;

enum { CUBLAS_OP_N = 0 };
enum { CUBLAS_SIDE_LEFT = 0 };
enum { CUBLAS_POINTER_MODE_HOST = 0 };
enum { CUBLAS_MATH_MODE_MASK = 15, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
enum { CUBLAS_COMPUTE_32F_FAST_16F = 74, CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };

/* cudaDataType, as far as the size or the rate of a type differs from another's. */
enum {
	CUDA_R_32F = 0,
	CUDA_R_64F = 1,
	CUDA_R_16F = 2,
	CUDA_R_8I = 3,
	CUDA_C_32F = 4,
	CUDA_C_64F = 5,
	CUDA_R_32I = 10,
	CUDA_R_16BF = 14,
	CUDA_R_8F_E4M3 = 28,
	CUDA_R_8F_E5M2 = 29,
	CUDA_R_4F_E2M1 = 33,
};

typedef struct blas_handle {
	CUstream stream;
	CUdeviceptr workspace;  /* our own; 0 once the program has set one */
	int pointer_mode;
	int math_mode;
	int sm_count_target;    /* 0 = all */
} *cublasHandle_t;

/* What multiplies and adds: the kind of arithmetic decides the rate. */
enum blas_rate { BLAS_FP64, BLAS_FP32, BLAS_TF32, BLAS_FP16, BLAS_FP8, BLAS_RATES };

/* The work of one call. */
struct blas_work {
	double multiply_adds;   /* of real numbers */
	double bytes;           /* read and written */
	double blocks;          /* of the kernel */
	enum blas_rate rate;
	bool is_product;        /* of matrices: the handle's math mode may make it faster */
	int sm_count_target;
};

/* A type of elements. */
struct blas_type {
	double bytes;
	double multiply_adds;   /* of real numbers, for one of this type: 4 for a complex one */
	enum blas_rate rate;
};

struct blas_type blas_type_of(int cuda_data_type);

/* The rate of a cublasComputeType_t: it may allow FP32 to multiply in fewer bits. */
enum blas_rate blas_rate_of(int compute, enum blas_rate rate);

/* A product of an m x k and a k x n matrix, `batch` times. */
struct blas_work blas_product(struct blas_type type, double m, double n, double k, double batch);

/* NULL without a driver. */
struct blas_driver {
#define DRIVER_CALLS(CALL)                                                                      \
	CALL(cuInit) CALL(cuCtxGetCurrent) CALL(cuCtxSetCurrent) CALL(cuCtxGetDevice)           \
	CALL(cuDevicePrimaryCtxRetain) CALL(cuDeviceGetAttribute) CALL(cuLibraryLoadData)       \
	CALL(cuLibraryGetKernel) CALL(cuLaunchKernel) CALL(cuMemAlloc_v2) CALL(cuMemFree_v2)    \
	CALL(cuMemsetD32Async) CALL(cuMemcpy2DAsync_v2) CALL(cuStreamSynchronize)
#define CALL(name) __typeof__(&name) name;
	DRIVER_CALLS(CALL)
#undef CALL
};
const struct blas_driver *blas_driver(void);

/* Launch one kernel for as long as the work takes on the current context's device. */
cublasStatus_t blas_launch(CUstream stream, struct blas_work work);

#endif
