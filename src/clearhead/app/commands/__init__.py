"""The commands, one function each; `clearhead.app.views` has the row of each."""
