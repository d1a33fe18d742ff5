pgq install
