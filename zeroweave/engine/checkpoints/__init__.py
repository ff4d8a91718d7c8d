"""What a run consists of, into a checkpoint and out of it.

Tensors, by name (NAME: a parameter's key in state dicts; R: a rank):

    param/NAME           the parameter, the float32 master where there is one
    state/NAME/KEY       what the optimizer keeps of each element, such as "exp_avg"; KEY: see `compatibility.quoted`
    buffer/NAME          a persistent buffer of rank 0, and of all ranks that have no other
    rank/R/buffer/NAME   that of rank R, where it is another
    client/N             the N-th tensor of what the program hands in that is too large for a value

Values, by name: "run", "model", "optimizer", "lr_scheduler", "loss_scale", "client"; "scalar/NAME/KEY", what the
optimizer keeps of a parameter as a whole, such as "step"; "rank/R/random", the states of random numbers; "data", the
position of rank 0's loader, and "rank/R/data", that of another rank where it is another; likewise "extra" and
"rank/R/extra", the extra state of modules by its names in state dicts.
"""
