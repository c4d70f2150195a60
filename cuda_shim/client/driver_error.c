/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's name for an error, for any way of opening the driver. */
#include "client/driver.h"

#include <stdio.h>

const char *driver_error(CUresult result)
{
	static char number[16];
	const char *name = NULL;
	if (cu.cuGetErrorName(result, &name) == CUDA_SUCCESS && name)
		return name;
	snprintf(number, sizeof number, "%d", (int)result);
	return number;
}
