/* Stand-ins for the CUDA entry points that a CuTe DSL object file calls (nvidia-cutlass-dsl 4.8.1).
   Linked into one library with the object, they let the object's own host code run with no GPU and no driver: it checks its arguments,
   encodes its TMA descriptors and reaches the launch, which goes to a callback. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int (*launch_fn)(const void *config, const char *kernel, void **params);
static launch_fn on_launch;
void set_launch_callback(launch_fn f) { on_launch = f; }

int _cudaLibraryLoadData(void **lib, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) { *lib = (void *)code; return 0; }
int _cudaLibraryGetKernel(void **kernel, void *lib, const char *name) { *kernel = strdup(name); return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 97 ? 232448 : 0; return 0; } /* 97: opt-in shared memory */
int _cudaFuncSetAttribute(const void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _cudaLaunchKernelEx(const void *config, void *kernel, void **params) { return on_launch ? on_launch(config, kernel, params) : 0; }
int cuda_dialect_init_library_once(void **slot, int (*init)(void **), int (*load)(void **, int), void *unload) {
    void *lib = 0;
    int status = init(&lib);
    if (!status && load) status = load(&lib, 0);
    *slot = lib;
    return status;
}
void cuda_dialect_unload_library_once(void *slot) {}
int CuteDSLRT_TVMFFISetRaisedCudaError(int status) { return -1; }
