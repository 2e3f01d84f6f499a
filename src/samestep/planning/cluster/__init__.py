"""What a recipe will do on a cluster that is not there: step time, MFU and cost, by a roofline model with overlap."""
