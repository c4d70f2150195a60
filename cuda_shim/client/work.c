#include "client/work.h"

/* A spin on the device's nanosecond timer. The simulated driver knows the kernel by its name and reads the same argument. */
static const char image[] = ".version 7.0\n"
			    ".target sm_70\n"
			    ".address_size 64\n"
			    ".visible .entry aliquot_spin(.param .u64 microseconds)\n"
			    "{\n"
			    "  .reg .pred %again;\n"
			    "  .reg .u64 %length, %start, %end, %now;\n"
			    "  ld.param.u64 %length, [microseconds];\n"
			    "  mul.lo.u64 %length, %length, 1000;\n"
			    "  mov.u64 %start, %globaltimer;\n"
			    "  add.u64 %end, %start, %length;\n"
			    "spin:\n"
			    "  mov.u64 %now, %globaltimer;\n"
			    "  setp.lt.u64 %again, %now, %end;\n"
			    "  @%again bra spin;\n"
			    "  ret;\n"
			    "}\n";

static CUfunction spin;

CUresult work_prepare(void)
{
	CUmodule module;
	CUresult result = cu.cuModuleLoadData(&module, image);
	return result == CUDA_SUCCESS ? cu.cuModuleGetFunction(&spin, module, "aliquot_spin") : result;
}

CUresult work_launch(uint64_t kernel_us)
{
	void *arguments[] = {&kernel_us};
	return cu.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL);
}
