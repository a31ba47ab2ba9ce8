"""The command line has one module for each command, their settings, and what a run prints. It may import every
package."""
