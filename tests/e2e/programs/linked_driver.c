/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver as a program has it that brings its own: linked in, so that no library stands between the program and the device.
 * Takes the place of client/driver.c in a static build of aliquot-cuda-client. */
#include "client/driver.h"

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
