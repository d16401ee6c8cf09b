/* The smallest user of the library: builds against the installed package, and runs what it was built for. */
#include <csa/csa.h>
#include <stdio.h>

int main(void)
{
    printf("libcsa %s\n", csa_version_string());
    return csa_version() != CSA_VERSION;
}
