/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.c - numbers, names and texts of errors, and the last error of each thread.
 *
 * The runtime uses the driver's numbers under its own names; programs ask for names and texts without a driver, so they come from a table.
 */
#include "simulated_runtime/runtime.h"

static _Thread_local cudaError_t last_error;

static const struct text {
	cudaError_t error;
	const char *name, *text;
} texts[] = {
#define ERROR(name, number, text) { name, #name, text },
#include "simulated_runtime/errors.def"
#undef ERROR
};

static const struct text *find(cudaError_t error)
{
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (texts[i].error == error)
			return &texts[i];
	return NULL;
}

cudaError_t rt_error(CUresult result)
{
	cudaError_t error = (cudaError_t)result;
	return error == cudaSuccess || find(error) ? error : cudaErrorUnknown;
}

/* A success keeps the stored error; "not ready" is no error (CUDA programming guide, error checking). */
cudaError_t rt_return(cudaError_t error)
{
	if (error != cudaSuccess && error != cudaErrorNotReady)
		last_error = error;
	return error;
}

EXPORT cudaError_t cudaGetLastError(void)
{
	cudaError_t error = last_error;
	last_error = cudaSuccess;
	return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
	return last_error;
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
	const struct text *found = find(error);
	return found ? found->name : "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
	const struct text *found = find(error);
	return found ? found->text : "unrecognized error code";
}
