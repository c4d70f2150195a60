/* What a driver says of its errors, however it was opened. */
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
