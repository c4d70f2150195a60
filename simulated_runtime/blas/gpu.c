/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.c - how long the work of a call takes, and the kernel that takes so long.
 *
 *     duration = max(multiply-adds / (SMs x clock x multiply-adds of one SM and clock), bytes / memory bandwidth), and at least LEAST_US
 *
 * That is the roofline of the device: the time that no library can beat. SMs, clocks and the memory bus are the driver's attributes (memory
 * moves two words a clock). Sources of the table: arithmetic throughput in NVIDIA's CUDA C++ Programming Guide for FP32 and FP64; the peak
 * dense tensor rates in NVIDIA's data sheets of V100, T4, A100, A10, L40S, H100 and B200 for the others, divided by SMs and boost clock. A
 * device without a kind of arithmetic uses the next wider one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

#include "simulated_runtime/blas/blas.h"

#define LEAST_US 2.0
#define THREADS  256
#define TILE     128.0
#define MOST_BLOCKS 2147483647.0

/* Multiply-adds of one SM and clock, from this compute capability on. */
static const struct {
	int capability;
	double rate[BLAS_RATES];
} rates[] = {
	/*            FP64  FP32  TF32  FP16  FP8 and INT8 */
	{ 100, { 64, 128, 2048, 4096, 8192 } }, { 90, { 128, 128, 1024, 2048, 4096 } }, { 89, { 2, 128, 256, 512, 1024 } },
	{ 86, { 2, 128, 128, 512, 1024 } },     { 80, { 64, 64, 512, 1024, 2048 } },    { 75, { 2, 64, 64, 512, 1024 } },
	{ 0, { 32, 64, 64, 512, 512 } },
};

static struct blas_driver driver;
static bool have_driver;
static CUkernel kernel;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The simulated driver knows this kernel by its name: it runs for its first parameter, in microseconds. */
static const char image[] =
	".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry aliquot_spin(.param .u64 microseconds)\n{ ret; }\n";

/* By dlopen and not by a dependency: a program imports this library on machines without a driver too. */
static void find_driver(void)
{
	CUlibrary library;
	void *file = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!file)
		return;
#define CALL(name)                                                  \
	driver.name = (__typeof__(driver.name))dlsym(file, #name);  \
	if (!driver.name)                                           \
		return;
	DRIVER_CALLS(CALL)
#undef CALL
	have_driver = driver.cuInit(0) == CUDA_SUCCESS &&
		      driver.cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0) == CUDA_SUCCESS &&
		      driver.cuLibraryGetKernel(&kernel, library, "aliquot_spin") == CUDA_SUCCESS;
}

const struct blas_driver *blas_driver(void)
{
	pthread_once(&once, find_driver);
	return have_driver ? &driver : NULL;
}

static double attribute(CUdevice_attribute which, CUdevice device)
{
	int value = 0;
	return driver.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static double rate_of(enum blas_rate rate, CUdevice device)
{
	int capability = (int)(10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) +
			       attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
	size_t row = 0;
	while (rates[row].capability > capability)
		row++;
	return rates[row].rate[rate];
}

/* Microseconds; see the formula above. */
static double duration_us(const struct blas_work *work, CUdevice device)
{
	double sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
	if (work->sm_count_target > 0 && work->sm_count_target < sms)
		sms = work->sm_count_target;
	/* kilohertz, so the quotients are milliseconds */
	double arithmetic = sms * attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, device) * rate_of(work->rate, device);
	double memory = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device) / 8 * 2 *
			attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device);
	double us = LEAST_US;
	if (arithmetic > 0 && 1000 * work->multiply_adds / arithmetic > us)
		us = 1000 * work->multiply_adds / arithmetic;
	if (memory > 0 && 1000 * work->bytes / memory > us)
		us = 1000 * work->bytes / memory;
	return us;
}

cublasStatus_t blas_launch(CUstream stream, struct blas_work work)
{
	CUdevice device;
	if (!blas_driver() || driver.cuCtxGetDevice(&device) != CUDA_SUCCESS)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	uint64_t microseconds = (uint64_t)(duration_us(&work, device) + 0.5);
	double blocks = work.blocks < 1 ? 1 : work.blocks > MOST_BLOCKS ? MOST_BLOCKS : work.blocks;
	void *parameters[] = { &microseconds };
	CUresult result = driver.cuLaunchKernel((CUfunction)kernel, (unsigned)blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
	return result == CUDA_SUCCESS ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

struct blas_type blas_type_of(int cuda_data_type)
{
	switch (cuda_data_type) {
	case CUDA_R_64F: return (struct blas_type){ 8, 1, BLAS_FP64 };
	case CUDA_C_32F: return (struct blas_type){ 8, 4, BLAS_FP32 };
	case CUDA_C_64F: return (struct blas_type){ 16, 4, BLAS_FP64 };
	case CUDA_R_16F:
	case CUDA_R_16BF: return (struct blas_type){ 2, 1, BLAS_FP16 };
	case CUDA_R_8I:
	case CUDA_R_8F_E4M3:
	case CUDA_R_8F_E5M2: return (struct blas_type){ 1, 1, BLAS_FP8 };
	case CUDA_R_4F_E2M1: return (struct blas_type){ 0.5, 1, BLAS_FP8 };
	default: return (struct blas_type){ 4, 1, BLAS_FP32 };
	}
}

enum blas_rate blas_rate_of(int compute, enum blas_rate rate)
{
	if (rate != BLAS_FP32)
		return rate;
	if (compute == CUBLAS_COMPUTE_32F_FAST_TF32)
		return BLAS_TF32;
	return compute == CUBLAS_COMPUTE_32F_FAST_16F || compute == CUBLAS_COMPUTE_32F_FAST_16BF ? BLAS_FP16 : BLAS_FP32;
}

/* Tiles of TILE x TILE elements of the result, one block each; each operand is read once and the result is read and written. */
struct blas_work blas_product(struct blas_type type, double m, double n, double k, double batch)
{
	double rows = (double)(uint64_t)((m + TILE - 1) / TILE), columns = (double)(uint64_t)((n + TILE - 1) / TILE);
	return (struct blas_work){
		.multiply_adds = m * n * k * batch * type.multiply_adds,
		.bytes = (m * k + k * n + 2 * m * n) * batch * type.bytes,
		.blocks = rows * columns * batch,
		.rate = type.rate,
		.is_product = true,
	};
}
