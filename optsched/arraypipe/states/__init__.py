"""Parts of the memory manager: slots, stores, copy engines, which state leaves when."""
