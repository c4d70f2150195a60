/* The CUDA driver as a program has it that brings its own: linked in, so that no library stands between the program and the device.
 * Takes the place of client/driver.c in a static build of aliquot-cuda-client. */
#include "client/driver.h"

#include <stdio.h>

struct driver cu;

const char driver_routes[] = "dlsym";

bool driver_open(const char *route)
{
	(void)route;
#define CLIENT_LINK(symbol, base) cu.symbol = symbol;
	CLIENT_ENTRY_POINTS(CLIENT_LINK)
#undef CLIENT_LINK
	return true;
}

const char *driver_error(CUresult result)
{
	static char number[16];
	const char *name = NULL;
	if (cu.cuGetErrorName(result, &name) == CUDA_SUCCESS && name)
		return name;
	snprintf(number, sizeof number, "%d", (int)result);
	return number;
}
