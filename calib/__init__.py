"""From activations to numbers: histograms, calibrators, samples, scales, plans. Imports none of ours."""
