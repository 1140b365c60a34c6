/* The inner loops of loading, without the interpreter: find documents, and copy them into rows.

   NumPy alone needs about a microsecond a document, which short documents feel; see docs/log.md for the
   figures. reference.py holds the same functions in NumPy, and a test compares the two.

   Addresses come from arrays that the caller keeps alive, and `copy` and `fill` trust them; `locate` and `bounds`
   make them, and check every index and length against the tables that come with it. Outputs are never written
   beyond their size. */

#include "kernel.h"

static PyMethodDef methods[] = {
    {"bounds", bounds, METH_VARARGS, NULL},
    {"copy", copy, METH_VARARGS, NULL},
    {"count_rows", count_rows, METH_VARARGS, NULL},
    {"locate", locate, METH_VARARGS, NULL},
    {"look_up", look_up, METH_VARARGS, NULL},
    {"pack", pack, METH_VARARGS, NULL},
    {"permute", permute, METH_VARARGS, NULL},
    {"plan", plan, METH_VARARGS, NULL},
    {"search", search, METH_VARARGS, NULL},
    {"fill", fill, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModule_Create(&module); }
