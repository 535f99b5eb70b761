"""Pictures of sparse features."""

import numpy as np

from clearhead.app import plot as canvas
from clearhead.app.plot import Figure
from clearhead.inside.features.training import TrainedFeatures

RAREST = 1e-6  # of held-out tokens: features that are never active stand there


def draw_training(trained: TrainedFeatures) -> Figure:
    """Draw the error over the blocks of training, and how often features are active on held-out text."""
    report = trained.report
    recovered = (
        "" if report.loss_recovered is None else f", {report.loss_recovered:.1%} of the loss recovered"
    )
    title = f"{trained.n_features:,} features: {report.variance_explained:.1%} of the variance{recovered}"
    figure, grid = canvas.panels(10, 3.6, title, columns=2, size=12)
    left, right = grid[0]
    left.plot(range(1, len(trained.losses) + 1), trained.losses, color=canvas.BLUE)
    canvas.name(left, "Error by block of tokens", "block", "error, share of the variance", size=10)
    right.hist(np.log10(np.maximum(report.density, RAREST)), bins=40, color=canvas.BLUE)
    canvas.name(
        right, f"Density: {report.dead:.1%} never active", "log10 of the share of tokens", "features", size=10
    )
    return figure
